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
INT8, TOPK = codecs.uniform(bits=8), codecs.topk(density=0.1)
METHODS = """
  init init_rounds encode decode sum_decoded encode_mean after_reduce
  canonical_state read_memory write_memory payload_like division encode_error
  leaf_groups count_dropped error
  """.split()
KEY = Lazy(functools.cache(lambda: make_key(0)))
# Valid arguments of every codec; one of arrays encodes in further calls.
CODECS = {
  "buckets": Call(INT8),
  "cast": Call("bfloat16"),
  "chain": Call(codecs.rotate(block=32), codecs.sign()),
  "codebook": Call(bits=2, span=6.0),
  "contributors": Call(TOPK),
  "dct": Call(chunk=8),
  "ef21": Call(INT8),
  "feedback": Call(INT8),
  "identity": Call(),
  "lloyd_max": Call(bits=2, block=64),
  "low_rank": Call(rank=2, sends="right"),
  "microscaling": Call(format="float8_e4m3fn"),
  "momentum_correction": Call(codecs.feedback(TOPK), decay=0.5),
  "nonnegative": Call(),
  "onebit": Call(),
  "random_k": Call(density=0.1),
  "rotate": Call(),
  "rules": Call(((".*", INT8),)),
  "sign": Call(),
  "ternary": Call(),
  "threshold": Call(value=0.5, capacity=0.5),
  "tiles": Call(chunk=8),
  "topk": Call(density=0.1, block=32),
  "topk_columns": Call(count=2),
  "truncate": Call(bytes=2),
  "uniform": Call(bits=8),
  "vote": Call(codecs.sign()),
  "where_smaller": Call(INT8, min_ratio=2.0, min_size=8, min_dimensions=1),
  "zero_value": Call(capacity=0.5),
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


INSTANCES = {name: call.make(f"codecs.{name}") for name, call in CODECS.items()}
GIVEN = {"leaves": [("w", LIKE)], "tree": {"w": X}, "key": KEY}
CALLS = {
  **{f"codecs.{name}": call for name, call in CODECS.items()},
  "codecs.MemoryPart": Call("error", row_of="sent", noun="it", kept_by="it"),
  "codecs.Codec.from_config": Call(
    INT8.config(), on=codecs.Codec.from_config, traced=False
  ),
  # Of a chain that one op of the kernels runs.
  "codecs.chain.encode_error": Call(
    X,
    Lazy(lambda: ErrorMemory(jnp.uint32(0), jnp.zeros(X.shape))),
    (),
    KEY,
    decay=0.5,
  ),
  "codecs.extend.partition": Call(INT8),
  "codecs.extend.Partition.merge": Call([X]),
}


def calls_of(name, codec):
  """Calls of the methods that a codec of arrays defines, and of the usual."""
  payload = Lazy(lambda: zeros(likes(codec)[0]))
  parts = {part.name: X for part in codec.memory_parts if part.row_of is None}
  given = {
    **dict.fromkeys(("x", "like", "output"), X),
    "leaves": [("w", LIKE)],
    "payload": payload,
    "payloads": Lazy(lambda: stacked(likes(codec)[0])),
    "state": Lazy(lambda: zeros(likes(codec)[1])),
    "key": KEY,
    "memory": Lazy(
      lambda: ErrorMemory(jnp.int32(1), jnp.zeros(X.shape), payload.make())
    ),
    **dict.fromkeys(("parts", "means"), parts),
    "workers": 2,
  }
  # One codec calls what all others inherit.
  usual = METHODS[:-1] if name == "uniform" else ("encode", "decode")
  return {
    f"codecs.{name}.{method}": Call(given=given, traced=True)
    for method in METHODS
    if method in {*usual, *vars(type(codec))}
  }


for _name, _codec in INSTANCES.items():
  if not _codec.is_tree:
    CALLS |= calls_of(_name, _codec)
INSTANCES["extend.Partition"] = Lazy(lambda: partition(INT8, {"w": LIKE}))
UNCALLED = {
  "codecs.Codec*": "abstract: the calls of every codec are called",
  "codecs.MultiRoundCodec*": "abstract: the calls of every codec are called",
  "codecs.extend.Division*": "abstract: collectives call it",
  "codecs.*.reduce_in_rounds": "a generator, which collectives run",
  "codecs.extend.Partition": "a record that `partition` returns",
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
