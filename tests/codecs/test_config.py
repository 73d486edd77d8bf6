import dataclasses
import json

import numpy as np
import pytest

from jaxmotion import codecs
from jaxmotion.codecs import Codec
from tests.codecs.table import ALGORITHMS, CODECS

NESTED = [
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


@pytest.mark.parametrize(
  "codec", [*NESTED, *CODECS.values(), *ALGORITHMS.values()], ids=repr
)
def test_a_codec_comes_back_from_json_and_from_its_repr(codec):
  config = codec.config()
  before = json.dumps(config)
  for again in (
    Codec.from_config(json.loads(before)),
    Codec.from_config(config),
    eval(repr(codec), vars(codecs)),
  ):
    assert again == codec and hash(again) == hash(codec)
    assert type(again) is type(codec) and repr(again) == repr(codec)
  # Reading a config does not change it.
  assert json.dumps(config) == before


def test_no_two_codecs_are_equal():
  assert len(set(NESTED)) == len(NESTED)
  int4 = codecs.uniform(bits=4)
  assert int4 != codecs.uniform(bits=5)
  # Fields left out have their defaults.
  assert Codec.from_config({"name": "uniform", "bits": 4}) == int4
  assert int4 == codecs.uniform(bits=4, block=512)


# None, and the abstract classes.
UNKNOWN = [
  None,
  *"""
  Codec ArrayCodec BlockCodec ChoiceCodec ElementCodec MemoryCodec
  MultiRoundCodec SparseCodec TileCodec TreeCodec WrapperCodec
  """.split(),
]


@pytest.mark.parametrize(
  ("config", "message"),
  [
    *(({"name": name}, f"`name` .* got {name!r}") for name in UNKNOWN),
    ({"name": "zip"}, "`name` of a codec in `config` must be .*uniform"),
    ({"name": "sign", "bits": 4}, "`config` of codec 'sign' must have"),
    ({"name": "uniform", "bits": 99}, "`bits` must be an integer in"),
    (
      {"name": "feedback", "codec": {"name": "topk", "density": 7}},
      "`density` must be a number in",
    ),
    ("sign", "`config` must be a dict"),
  ],
)
def test_what_describes_no_codec_is_named(config, message):
  with pytest.raises((TypeError, ValueError), match=message):
    Codec.from_config(config)


def test_fields_are_plain_values():
  for kind, value in (
    (lambda v: codecs.uniform(bits=v), np.int64(8)),
    (lambda v: codecs.topk(density=v), np.float32(0.5)),
    (codecs.cast, np.dtype("float16")),
  ):
    with pytest.raises((TypeError, ValueError), match="must be"):
      kind(value)


FUSED = codecs.chain(codecs.rotate(block=32), codecs.sign())


@pytest.mark.parametrize("codec", [codecs.uniform(bits=4), FUSED], ids=repr)
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


def test_classes_of_one_name_are_not_mixed_up_and_none_takes_ours():
  one = define_codec("mine_for_test", "my_codecs")
  assert Codec.from_config(one().config()) == one()
  again = define_codec("mine_for_test", "my_codecs")
  assert type(Codec.from_config(again().config())) is again
  other = define_codec("mine_for_test", "other_codecs")
  with pytest.raises(ValueError, match="my_codecs.mine_for_test and other_cod"):
    Codec.from_config(other().config())
  with pytest.raises(TypeError, match="`name` of a codec class must be none"):
    define_codec("sign", "my_codecs")
  assert Codec.from_config({"name": "sign"}) == codecs.sign()
