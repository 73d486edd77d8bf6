"""Calls of the ops that pack payloads."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import make_key
from jaxmotion.kernels import ErrorMemory, blocks, compact
from jaxmotion.kernels.quantize import AbsmaxOp
from tests.arguments.calls import Call, Lazy

X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(4, 32)
OP = AbsmaxOp(bits=8, block=32)
KEY = Lazy(lambda: make_key(0))


def payload(*batch):
  like = jax.eval_shape(lambda x: blocks.encode(OP, x), X)
  return jax.tree.map(lambda a: jnp.zeros((*batch, *a.shape), a.dtype), like)


WORDS = np.zeros((4, 2), np.uint32)
TILES = Lazy(lambda: compact.compact_tiles(jnp.zeros(32, jnp.uint32), 32, 8))
BITMAP = np.zeros(4, np.uint32)

CALLS = {
  "kernels.blocks.decode": Call(OP, Lazy(payload), X, traced=True),
  "kernels.blocks.encode": Call(OP, X, KEY, traced=True),
  "kernels.blocks.encode_error": Call(
    OP,
    X,
    Lazy(lambda: ErrorMemory(jnp.uint32(0), jnp.zeros(X.shape), payload())),
    KEY,
    decay=0.5,
    traced=True,
  ),
  "kernels.blocks.encode_mean": Call(
    OP, Lazy(lambda: payload(2)), X, KEY, traced=True
  ),
  "kernels.blocks.payload_like": Call(OP, X),
  "kernels.blocks.sum_decoded": Call(
    OP, Lazy(lambda: payload(2)), X, traced=True
  ),
  "kernels.compact.threshold_bitmap": Call(X, 0.5, traced=True),
  "kernels.compact.bitmap_positions": Call(
    BITMAP, np.zeros(5, np.int32), 8, traced=True
  ),
  "kernels.compact.compact_tiles": Call(
    np.zeros(32, np.uint32), 32, 8, traced=True
  ),
  "kernels.compact.expand_tiles": Call(TILES, 32, traced=True),
  "kernels.narrow.cast_encode": Call(X, "bfloat16", traced=True),
  "kernels.narrow.cast_decode": Call(
    X.astype(np.uint16), X, "bfloat16", traced=True
  ),
  "kernels.narrow.cast_sum": Call(
    X.astype(np.uint16)[None], X, "bfloat16", traced=True
  ),
  "kernels.narrow.truncate_encode": Call(X, 2, traced=True),
  "kernels.narrow.truncate_decode": Call(
    Lazy(lambda: (jnp.zeros(X.shape, jnp.uint8),) * 2), X, traced=True
  ),
  "kernels.narrow.truncate_sum": Call(
    Lazy(lambda: (jnp.zeros((2, *X.shape), jnp.uint8),) * 2), X, traced=True
  ),
  "kernels.select.topk_select": Call(X, 1, 4, traced=True),
  "kernels.select.topk_scatter": Call(
    np.zeros((1, 32), np.float32),
    np.zeros((1, 32), np.uint32),
    X,
    4,
    traced=True,
  ),
  "kernels.select.topk_sum": Call(
    np.zeros((2, 1, 32), np.float32),
    np.zeros((2, 1, 32), np.uint32),
    X,
    4,
    traced=True,
  ),
  "kernels.quantize.AbsmaxOp": Call(bits=8, block=32),
  "kernels.quantize.MinMaxOp": Call(bits=8, block=32),
  "kernels.sign.SignOp": Call(block=32),
  "kernels.ternary.TernaryOp": Call(block=32),
  "kernels.microscaling.MicroscalingOp": Call(format="float8_e4m3fn", block=32),
  "kernels.rotate.RotateOp": Call(op=OP, length=32, seed=0),
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
KNOWN_BAD = set()
