import dataclasses
import json

import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.codecs import Codec

NESTED = [
  codecs.identity(),
  codecs.uniform(bits=3, block=7, symmetric=False, rounding="stochastic"),
  codecs.feedback(codecs.topk(density=0.25), decay=0.5, form="global"),
  codecs.chain(codecs.topk(density=0.5, block=8), codecs.uniform(bits=8)),
  codecs.rules([("bias", codecs.identity()), (".*", codecs.sign())]),
  codecs.buckets(codecs.cast("bfloat16"), max_leaf_size=3, max_bucket_size=9),
  codecs.feedback(
    codecs.buckets(
      codecs.rules(
        [
          (r"^a/\d+", codecs.chain(codecs.identity(), codecs.sign(block=5))),
          ("", codecs.truncate(bytes=2, rounding="nearest")),
        ]
      )
    )
  ),
]
EACH = pytest.mark.parametrize("codec", NESTED, ids=lambda c: type(c).__name__)


@EACH
def test_a_codec_comes_back_from_json(codec):
  again = Codec.from_config(json.loads(json.dumps(codec.config())))
  assert again == codec and hash(again) == hash(codec)
  assert type(again) is type(codec) and repr(again) == repr(codec)


@EACH
def test_the_repr_is_the_expression_that_makes_it(codec):
  again = eval(repr(codec), vars(codecs))
  assert again == codec and hash(again) == hash(codec)


def test_no_two_codecs_are_equal():
  assert len(set(NESTED)) == len(NESTED)
  assert codecs.uniform(bits=4) != codecs.uniform(bits=5)
  assert codecs.uniform(bits=4) == codecs.uniform(bits=4, block=512)


def test_fields_left_out_have_their_defaults():
  assert Codec.from_config({"name": "uniform", "bits": 4}) == codecs.uniform(
    bits=4
  )


def test_a_config_is_not_changed_by_reading_it():
  config = NESTED[-1].config()
  before = json.dumps(config)
  Codec.from_config(config)
  assert json.dumps(config) == before


ABSTRACT = """
Codec ArrayCodec BlockCodec ChoiceCodec ElementCodec MemoryCodec MultiRoundCodec
SparseCodec TileCodec TreeCodec WrapperCodec
""".split()


@pytest.mark.parametrize("name", ["zip", None, *ABSTRACT])
def test_an_unknown_name_is_named(name):
  with pytest.raises(
    ValueError, match="`name` of a codec in `config` must be"
  ) as e:
    Codec.from_config({"name": name})
  assert "uniform" in str(e.value) and repr(name) in str(e.value)


def test_an_unknown_field_is_named():
  with pytest.raises(ValueError, match="`config` of codec 'sign' must have"):
    Codec.from_config({"name": "sign", "bits": 4})


def test_a_bad_value_is_named_as_in_the_constructor():
  with pytest.raises(ValueError, match="`bits` must be an integer in"):
    Codec.from_config({"name": "uniform", "bits": 99})
  inner = {"name": "topk", "density": 7}
  with pytest.raises(ValueError, match="`density` must be a number in"):
    Codec.from_config({"name": "feedback", "codec": inner})


@pytest.mark.parametrize(
  ("make", "value"),
  [
    (lambda v: codecs.uniform(bits=v), np.int64(8)),
    (lambda v: codecs.topk(density=v), np.float32(0.5)),
    (lambda v: codecs.cast(v), np.dtype("float16")),
  ],
)
def test_fields_are_plain_values(make, value):
  with pytest.raises((TypeError, ValueError), match="must be"):
    make(value)


@pytest.mark.parametrize(
  "codec",
  [
    codecs.uniform(bits=4),
    codecs.chain(codecs.rotate(block=32), codecs.sign()),
  ],
  ids=repr,
)
def test_the_kernel_op_is_built_once_and_is_no_field(codec):
  fresh = Codec.from_config(codec.config())
  name = "_fused_op" if isinstance(codec, codecs.chain) else "kernel_op"
  assert getattr(codec, name) is getattr(codec, name)
  # `fresh` has built no op yet.
  assert codec == fresh and hash(codec) == hash(fresh)
  assert repr(codec) == repr(fresh) and codec.config() == fresh.config()


def define_codec(name, module):
  """A codec class of a user's own."""
  body = {
    "__module__": module,
    "encode": codecs.identity.encode,
    "decode": codecs.identity.decode,
  }
  return dataclasses.dataclass(frozen=True)(type(name, (Codec,), body))


def test_a_class_of_your_own_takes_no_name_of_ours():
  with pytest.raises(TypeError, match="`name` of a codec class must be none"):
    define_codec("sign", "my_codecs")
  assert Codec.from_config({"name": "sign"}) == codecs.sign()


def test_two_classes_of_one_name_are_not_mixed_up():
  one = define_codec("mine_for_test", "my_codecs")
  assert Codec.from_config(one().config()) == one()
  again = define_codec("mine_for_test", "my_codecs")
  assert type(Codec.from_config(again().config())) is again
  other = define_codec("mine_for_test", "other_codecs")
  with pytest.raises(ValueError, match="my_codecs.mine_for_test and other_cod"):
    Codec.from_config(other().config())


def test_a_config_is_a_dict():
  with pytest.raises(TypeError, match="`config` must be a dict"):
    Codec.from_config("sign")
