"""Calls of the ops that pack payloads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import make_key
from jaxmotion.kernels import ErrorMemory, blocks, compact
from jaxmotion.kernels.quantize import AbsmaxOp
from tests.arguments.calls import Call, Lazy

X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32)
OP = AbsmaxOp(bits=8, block=32)
KEY = Lazy(functools.cache(lambda: make_key(0)))


@functools.cache
def payload_like():
  return jax.eval_shape(lambda x: blocks.encode(OP, x), X)


def payload(*batch):
  make = lambda a: jnp.zeros((*batch, *a.shape), a.dtype)
  return jax.tree.map(make, payload_like())


BITMAP = np.zeros(4, np.uint32)
ROWS = np.zeros((2, 1, 32), np.uint32)
TRACED = True
GIVEN = {
  **dict.fromkeys(("x", "like"), X),
  "op": OP,
  "key": KEY,
  "payload": Lazy(payload),
  "payloads": Lazy(lambda: payload(2)),
  "memory": Lazy(
    lambda: ErrorMemory(jnp.uint32(0), jnp.zeros(X.shape), payload())
  ),
  "decay": 0.5,
  "words": X.astype(np.uint16),
  "dtype": "bfloat16",
  "bytes": 2,
  "planes": 4,
  "k": 1,
  "bits": 8,
  "block": 32,
  "format": "float8_e4m3fn",
  "length": 32,
  "seed": 0,
}
CALLS = {
  "kernels.compact.threshold_bitmap": Call(threshold=0.5),
  "kernels.compact.bitmap_positions": Call(BITMAP, np.zeros(5, np.int32), 8),
  "kernels.compact.compact_tiles": Call(np.zeros(32, np.uint32), 32, 8),
  "kernels.compact.expand_tiles": Call(
    Lazy(
      functools.cache(
        lambda: compact.compact_tiles(jnp.zeros(32, jnp.uint32), 32, 8)
      )
    ),
    32,
  ),
  "kernels.narrow.cast_sum": Call(X.astype(np.uint16)[None]),
  "kernels.narrow.truncate_decode": Call(
    Lazy(lambda: (jnp.zeros(X.shape, jnp.uint8),) * 2)
  ),
  "kernels.narrow.truncate_sum": Call(
    Lazy(lambda: (jnp.zeros((2, *X.shape), jnp.uint8),) * 2)
  ),
  "kernels.select.topk_scatter": Call(ROWS[0].astype(np.float32), ROWS[0]),
  "kernels.select.topk_sum": Call(ROWS.astype(np.float32), ROWS),
}
_PASS = "the passes of kernels.blocks call it"
_UNCHECKED = "codecs and ops call it with what they have checked"
UNCALLED = {
  "kernels.BlockOp*": "abstract: every op defines it",
  "kernels.quantize.UniformOp*": "abstract: two ops define it",
  "kernels.*Op.*": _PASS,
  "kernels.blocks.*_pass": _UNCHECKED,
  **dict.fromkeys(
    """
    kernels.check_block kernels.describe_payload kernels.nearest_planes
    kernels.plane_length
    kernels.add_error* kernels.clear_error kernels.count_encoding
    kernels.error_of kernels.is_read_slowly kernels.sum_decoded
    kernels.compact.prefix_counts kernels.pack.* kernels.rotate.rotate*
    kernels.select.draw_stratified kernels.select.stratum_sizes
    """.split(),
    _UNCHECKED,
  ),
}
ACCEPTED = {
  ("*", "size"): {"zero": "nothing is packed"},
  ("*", "seed"): {"zero": "a seed like any other"},
  ("kernels.blocks.encode_error", "decay"): {"zero": "the error is forgotten"},
  ("kernels.compact.threshold_bitmap", "threshold"): {
    "huge": "float32 has larger numbers"
  },
  ("kernels.compact.bitmap_positions", "capacity"): {"zero": "no slot"},
}
