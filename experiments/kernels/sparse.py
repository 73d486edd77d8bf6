"""Ops that keep some elements and their positions."""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from experiments.kernels import arrays
from experiments.kernels.ops import Op, stack_payloads, take_array
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import compact, select

_ARRAYS = {name: case.make for name, case in arrays.SELECTED.items()}
# Elements compacted together, half of them zeros, and capacity for the others.
_TILE, _CAPACITY = 1024, 576
# One normal element in 22 reaches the threshold: 4.6 %, less than the capacity.
_THRESHOLD, _CAPACITY_SHARE = 2.0, 0.05


def list_ops() -> list[Op]:
  """Returns the ops of top-k, zero-value and threshold codecs."""
  return [
    *_topk_ops(1, 128),
    *_topk_ops(4, 256),
    *_zero_value_ops(),
    *_threshold_ops(),
  ]


def _topk_ops(k: int, planes: int) -> list[Op]:
  """Returns selection, scattering and summing of the largest elements."""

  def encode(like: ShapedLike, x: Array, **options: Any) -> PyTree:
    return select.topk_select(x, k, planes, **options)

  def decode(
    like: ShapedLike, values: Array, places: Array, **options: Any
  ) -> Array:
    return select.topk_scatter(values, places, like, planes, **options)

  def sum_payloads(
    like: ShapedLike, values: Array, places: Array, **options: Any
  ) -> Array:
    return select.topk_sum(values, places, like, planes, **options)

  one = lambda x: select.topk_select(x, k, planes)
  return [
    Op(f"top{k}of{planes}", encode, take_array, _ARRAYS),
    Op(f"top{k}of{planes}_scatter", decode, one, _ARRAYS),
    Op(f"top{k}of{planes}_sum", sum_payloads, stack_payloads(one), _ARRAYS),
  ]


def _zero_value_ops() -> list[Op]:
  """Returns compaction of nonzero words, and its inverse."""

  def encode(like: ShapedLike, words: Array, **options: Any) -> PyTree:
    return compact.compact_tiles(words, _TILE, _CAPACITY, **options)

  def decode(like: ShapedLike, tiles: PyTree, **options: Any) -> Array:
    size = math.prod(like.shape)
    return compact.expand_tiles(tiles, size, **options)

  def make_words(x: Array) -> Array:
    rectified = jnp.maximum(x, 0).astype(jnp.float32).reshape(-1)
    return lax.bitcast_convert_type(rectified, jnp.uint32)

  compacted = lambda x: (
    compact.compact_tiles(make_words(x), _TILE, _CAPACITY),
  )
  return [
    Op("compact", encode, lambda x: (make_words(x),), arrays.MARKED),
    Op("expand", decode, compacted, arrays.MARKED),
  ]


def _threshold_ops() -> list[Op]:
  """Returns marking of large elements, and the positions of marks."""

  def mark_large(like: ShapedLike, x: Array, **options: Any) -> Array:
    return compact.threshold_bitmap(x, _THRESHOLD, **options)

  def find_positions(
    like: ShapedLike, bitmap: Array, start: Array, **options: Any
  ) -> Array:
    capacity = max(1, round(_CAPACITY_SHARE * math.prod(like.shape)))
    return compact.bitmap_positions(bitmap, start, capacity, **options)

  def mask_positions(like: ShapedLike, args: tuple, positions: Array) -> Array:
    # Positions after the last mark are arbitrary.
    found = jnp.arange(positions.size) < args[1][-1]
    return jnp.where(found, positions, 0)

  def make_bitmap(x: Array) -> tuple[PyTree, ...]:
    bitmap = compact.threshold_bitmap(x, _THRESHOLD)
    return bitmap, compact.prefix_counts(bitmap)

  return [
    Op("mark", mark_large, take_array, arrays.MARKED),
    Op(
      "positions",
      find_positions,
      make_bitmap,
      arrays.MARKED,
      view=mask_positions,
    ),
  ]
