"""Calls of the codecs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, make_key
from jaxmotion.codecs.extend import partition
from jaxmotion.kernels import ErrorMemory
from tests.arguments.calls import Call, Lazy

X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32)
LIKE = jax.ShapeDtypeStruct(X.shape, X.dtype)
INT8 = codecs.uniform(bits=8)
KEY = Lazy(lambda: make_key(0))
TABLE = {
  "cast": codecs.cast("bfloat16"),
  "codebook": codecs.codebook(bits=2),
  "chain": codecs.chain(codecs.rotate(block=32), codecs.sign()),
  "contributors": codecs.contributors(codecs.topk(density=0.1)),
  "dct": codecs.dct(chunk=8),
  "ef21": codecs.ef21(INT8),
  "feedback": codecs.feedback(INT8),
  "identity": codecs.identity(),
  "lloyd_max": codecs.lloyd_max(bits=2),
  "low_rank": codecs.low_rank(rank=2),
  "microscaling": codecs.microscaling(format="float8_e4m3fn"),
  "momentum_correction": codecs.momentum_correction(
    codecs.feedback(codecs.topk(density=0.1))
  ),
  "nonnegative": codecs.nonnegative(),
  "onebit": codecs.onebit(),
  "random_k": codecs.random_k(density=0.1),
  "rotate": codecs.rotate(),
  "sign": codecs.sign(),
  "ternary": codecs.ternary(),
  "threshold": codecs.threshold(value=0.5, capacity=0.5),
  "tiles": codecs.tiles(chunk=8),
  "topk": codecs.topk(density=0.1),
  "topk_columns": codecs.topk_columns(count=2),
  "truncate": codecs.truncate(bytes=2),
  "uniform": INT8,
  "vote": codecs.vote(),
  "zero_value": codecs.zero_value(capacity=0.5),
}
TREES = {
  "buckets": codecs.buckets(INT8),
  "rules": codecs.rules(((".*", INT8),)),
  "where_smaller": codecs.where_smaller(INT8),
}


@functools.cache
def likes(codec):
  state = jax.eval_shape(codec.init, LIKE)
  encode = lambda x, state: codec.encode(x, state, make_key(0))
  payload, state = jax.eval_shape(encode, LIKE, state)
  return payload, state


def zeros(like):
  return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)


def stacked(like):
  return jax.tree.map(lambda a: jnp.zeros((2, *a.shape), a.dtype), like)


CALLS = {
  "codecs.buckets": Call(INT8),
  "codecs.cast": Call("bfloat16"),
  "codecs.chain": Call(codecs.rotate(), codecs.sign()),
  "codecs.codebook": Call(bits=2, span=6.0),
  "codecs.contributors": Call(codecs.topk(density=0.1)),
  "codecs.dct": Call(chunk=8),
  "codecs.ef21": Call(INT8),
  "codecs.feedback": Call(INT8),
  "codecs.identity": Call(),
  "codecs.lloyd_max": Call(bits=2, block=64),
  "codecs.low_rank": Call(rank=2, sends="right"),
  "codecs.microscaling": Call(format="float8_e4m3fn"),
  "codecs.momentum_correction": Call(
    codecs.feedback(codecs.topk(density=0.1)), decay=0.5
  ),
  "codecs.nonnegative": Call(),
  "codecs.onebit": Call(),
  "codecs.random_k": Call(density=0.1),
  "codecs.rotate": Call(),
  "codecs.rules": Call(((".*", INT8),)),
  "codecs.sign": Call(),
  "codecs.ternary": Call(),
  "codecs.threshold": Call(value=0.5, capacity=0.5),
  "codecs.tiles": Call(chunk=8),
  "codecs.topk_columns": Call(count=2),
  "codecs.topk": Call(density=0.1, block=32),
  "codecs.truncate": Call(bytes=2),
  "codecs.uniform": Call(bits=8),
  "codecs.vote": Call(codecs.sign()),
  "codecs.where_smaller": Call(
    INT8, min_ratio=2.0, min_size=8, min_dimensions=1
  ),
  "codecs.zero_value": Call(capacity=0.5),
  "codecs.MemoryPart": Call("error", row_of="sent", noun="it", kept_by="it"),
  "codecs.Codec.from_config": Call(INT8.config()),
  "codecs.ErrorBound": Call(),
  "codecs.Laws": Call(),
  "codecs.feedback.error": Call(
    Lazy(lambda: zeros(likes(TABLE["feedback"])[1])),
    on=TABLE["feedback"].error,
    traced=True,
  ),
  "codecs.chain.encode_error": Call(
    X,
    Lazy(lambda: ErrorMemory(jnp.uint32(0), jnp.zeros(X.shape))),
    (),
    KEY,
    decay=0.5,
    on=TABLE["chain"].encode_error,
    traced=True,
  ),
  "codecs.extend.partition": Call(INT8, {"w": X}),
  "codecs.extend.Partition.split": Call(
    {"w": X},
    on=Lazy(lambda: partition(INT8, {"w": LIKE}).split),
    traced=True,
  ),
  "codecs.extend.Partition.merge": Call(
    [X],
    on=Lazy(lambda: partition(INT8, {"w": LIKE}).merge),
    traced=True,
  ),
  "codecs.extend.Partition.array_keys": Call(
    KEY,
    on=Lazy(lambda: partition(INT8, {"w": LIKE}).array_keys),
    traced=True,
  ),
}


def calls_of(name, codec):
  """Calls of the methods that a codec of arrays defines, and of the usual."""
  payload = Lazy(lambda: zeros(likes(codec)[0]))
  payloads = Lazy(lambda: stacked(likes(codec)[0]))
  state = Lazy(lambda: zeros(likes(codec)[1]))
  memory = Lazy(
    lambda: ErrorMemory(jnp.int32(1), jnp.zeros(X.shape), payload.make())
  )
  parts = {part.name: X for part in codec.memory_parts if part.row_of is None}
  calls = {
    "init": Call(X, on=codec.init, traced=True),
    "init_rounds": Call(X, 2, on=codec.init_rounds, traced=True),
    "encode": Call(X, state, KEY, on=codec.encode, traced=True),
    "decode": Call(payload, X, on=codec.decode, traced=True),
    "sum_decoded": Call(payloads, X, on=codec.sum_decoded, traced=True),
    "encode_mean": Call(
      payloads, X, state, KEY, on=codec.encode_mean, traced=True
    ),
    "after_reduce": Call(state, X, on=codec.after_reduce, traced=True),
    "canonical_state": Call(state, on=codec.canonical_state, traced=True),
    "read_memory": Call(state, X, on=codec.read_memory, traced=True),
    "write_memory": Call(
      parts, parts, X, 2, on=codec.write_memory, traced=True
    ),
    "payload_like": Call(LIKE, on=codec.payload_like),
    "division": Call(LIKE, 2, on=codec.division),
    "encode_error": Call(
      X, memory, state, KEY, on=codec.encode_error, traced=True
    ),
    "leaf_groups": Call([("w", LIKE)], on=codec.leaf_groups),
    "count_dropped": Call(payload, LIKE, on=codec.count_dropped, traced=True),
  }
  return {
    f"codecs.{name}.{method}": call
    for method, call in calls.items()
    # One codec calls what all others inherit.
    if method in ("encode", "decode", *vars(type(codec))) or name == "uniform"
  }


for _name, _codec in TABLE.items():
  CALLS |= calls_of(_name, _codec)
for _name, _codec in TREES.items():
  CALLS[f"codecs.{_name}.leaf_groups"] = Call(
    [("w", LIKE)], on=_codec.leaf_groups
  )
UNCALLED = {
  "codecs.Codec*": "abstract: the calls of every codec are called",
  "codecs.MultiRoundCodec*": "abstract: the calls of every codec are called",
  "codecs.extend.Division*": "abstract: collectives call it",
  "codecs.*.reduce_in_rounds": "a generator, which collectives run",
  "codecs.extend.Partition": "a record that `partition` returns",
  "codecs.extend.Partition.array_likes": "it has no arguments",
  "codecs.extend.stand_in_reply": "its message is a record that a codec made",
  "codecs.extend.check_codec": "it is a check of arguments itself",
  "codecs.extend.fold_paths": "the paths of a tree are given to it",
}
ANY_SIZE = {"zero": "no error", "huge": "a large error"}
_NAME = {"misspelt": "any name will do"}
_PARTS = {"dict": "parts of other codecs are ignored"}
ACCEPTED = {
  **{
    ("codecs.MemoryPart", field): _NAME
    for field in ("name", "row_of", "noun", "kept_by")
  },
  ("codecs.uniform.write_memory", "parts"): _PARTS,
  ("codecs.uniform.write_memory", "means"): _PARTS,
  ("codecs.ErrorBound", "relative"): ANY_SIZE,
  ("codecs.ErrorBound", "peak"): ANY_SIZE,
  ("codecs.ErrorBound", "floor"): ANY_SIZE,
  ("codecs.Laws", "contraction"): {"zero": "no contraction"},
  ("codecs.Laws", "largest"): {"huge": "float32 has larger ones"},
  ("codecs.buckets", "max_leaf_size"): {"huge": "every leaf is joined"},
  ("codecs.buckets", "max_bucket_size"): {"huge": "one bucket"},
  ("codecs.momentum_correction", "decay"): {"zero": "no momentum"},
  ("codecs.where_smaller", "min_size"): {
    "zero": "leaves of any size",
    "huge": "no leaf is so large",
  },
  ("codecs.where_smaller", "min_dimensions"): {"zero": "leaves of any shape"},
  ("codecs.threshold", "value"): {"huge": "nothing is sent"},
  ("*", "leaves"): {"empty": "a tree without leaves"},
}
KNOWN_BAD = set()
