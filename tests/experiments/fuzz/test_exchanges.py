"""Generated exchanges: sound ones keep all laws, broken parts are found."""

from experiments.fuzz import exchanges
from experiments.fuzz.exchange_programs import Setup
from jaxmotion import codecs
from jaxmotion.collectives import _arguments, _rounds, extend

SETUP = Setup(
  hosts=3,
  codec=codecs.feedback(codecs.uniform(bits=4)),
  shapes=((200,), (3,)),
  dtypes=("float32", "float32"),
  nonfinite="skip",
  weighted=True,
)


def test_sound_exchanges_keep_every_law():
  assert find_laws(SETUP) == set()
  done = exchanges.run_round(11)
  assert done.cases > 3
  assert done.defects == ()


def find_laws(setup):
  found = exchanges.check_exchange(setup, 0).defects
  assert all(repr(setup) in defect.case for defect in found)
  return {defect.law for defect in found}


def test_an_exchange_with_broken_parts_is_found(monkeypatch):
  monkeypatch.setattr(_arguments, "apply_weight", lambda x, *_: x)
  monkeypatch.setattr(
    extend, "keep_update", lambda ok, new, state, old: (new, state)
  )
  assert find_laws(SETUP) >= {
    "predicted bytes are the traced ones",
    "sent and remembered is what came and was remembered",
    "skip does what its page says",
  }


def test_shards_that_stay_where_they_are_are_found(monkeypatch):
  monkeypatch.setitem(_rounds._SEND, "all_to_all", lambda rows, *_: rows)
  plain = Setup(3, codecs.uniform(bits=8), ((200,),), ("float32",))
  assert "the result is the mean of what was decoded" in find_laws(plain)
