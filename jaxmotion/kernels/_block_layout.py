"""Division of arrays into planes and blocks, and reductions of blocks.

A plane is a contiguous run of the flat array; the planes are packed into the
same words. A block is a contiguous run of a plane with one scale.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.core import Array, PyTree, ShapedLike

# Rows are kept whole while padding is at most size / _WASTE_DIVISOR elements.
_WASTE_DIVISOR = 32
# Smaller arrays take a gather of single elements: fewer operations.
_MIN_SLICED = 1 << 12
# Decoded elements that are worth writing to memory before they are read. The C
# library returns buffers of 32 MiB and more to the system: fresh pages at every
# step (2 to 5x).
_MIN_APART, _MAX_APART = 1 << 15, (1 << 23) - (1 << 10)
# Elements of a row, and rows, from which a division a row costs little.
_MIN_MINOR, _MIN_ROWS = 64, 8
# XLA:CPU asks of each element of a long vector whether it exists, unless the
# number of cores divides its length. Longer planes are a multiple.
_LONG, _MULTIPLE = 1 << 9, 16
# Elements that a reduction compares side by side, by vector instructions.
_LANES = 32
# The least number of elements that a sum adds side by side, and the most runs
# of so many. XLA:CPU writes a part of an array to memory if more than 15 slices
# of it are read; 8 runs were faster than 15.
_SUM_LANES, _MAX_RUNS = 64, 8
# Elements of an array from which its blocks, of a power of two of elements, are
# added as they are.
_MIN_WHOLE_SUMS = 1 << 22


@functools.lru_cache(maxsize=4096)
def block_shape(
  shape: tuple[int, ...], planes: int, block: int
) -> tuple[int, int, int]:
  """Returns (planes, blocks per plane, elements per block).

  Blocks are contiguous runs of at most `block` elements, all of one width.
  Where it costs little padding, blocks and planes consist of whole rows of the
  array, or of whole fractions of a row. A compiler that decodes into the
  array's own shape then divides once per row instead of once per element.
  XLA:CPU needs this to use vectors (6x).

  Args:
    shape: shape of the array.
    planes: number of planes.
    block: maximum number of elements per block.

  >>> block_shape((10,), 8, 512), block_shape((1 << 16,), 8, 512)
  ((8, 1, 2), (8, 16, 512))
  >>> block_shape((784, 2048), 32, 1024), block_shape((1000, 100), 8, 512)
  ((32, 50, 1024), (8, 25, 500))
  """
  size = math.prod(shape)
  length = math.ceil(size / planes)
  count = max(1, math.ceil(length / block))
  plain = planes, count, math.ceil(length / count)
  if len(shape) < 2 or size <= block:
    return plain
  rows = math.ceil(size // shape[-1] / planes)
  width = row_aligned_width(shape[-1], block)
  if width >= shape[-1]:
    # Rows per block, evened out so that the last block is as full as others.
    rows_per_block = width // shape[-1]
    count = math.ceil(rows / rows_per_block)
    width = math.ceil(rows / count) * shape[-1]
  else:
    count = rows * (shape[-1] // width)
  waste = planes * count * width - size
  if 4 * width < block or waste > size // _WASTE_DIVISOR:
    return plain
  return planes, count, width


def row_aligned_width(minor: int, block: int) -> int:
  """Returns the largest width up to `block` of whole rows or a divisor of one.

  >>> row_aligned_width(100, 512), row_aligned_width(2048, 512)
  (500, 512)
  >>> row_aligned_width(768, 512)
  384
  """
  if minor <= block:
    return block // minor * minor
  return max(filter(block.__ge__, divisors(minor)))


def nearest_planes(shape: tuple[int, ...], target: float) -> int:
  """Returns the number of planes nearest to `target` that follows the rows.

  Planes of whole rows, or of a whole fraction of one, are chosen if some are
  within 1.5x of the target. Otherwise the target itself is rounded.

  >>> nearest_planes((4096, 4096), 100), nearest_planes((784, 2048), 100)
  (128, 98)
  >>> nearest_planes((10, 70), 100), nearest_planes((997,), 100)
  (100, 100)
  """
  plain = max(1, round(target))
  if 0 in shape:
    return plain
  minor = shape[-1] if len(shape) > 1 else 1
  rows = math.prod(shape) // minor
  choices = [*divisors(rows), *(rows * d for d in divisors(minor))]
  best = min(choices, key=lambda c: max(c / target, target / c))
  return best if max(best / target, target / best) <= 1.5 else plain


def plane_length(shape: tuple[int, ...], planes: int) -> int:
  """Returns the elements of a plane of an array that is cut into planes.

  Planes consist of whole rows where that costs little padding. Long ones of
  other arrays are a multiple of 16 elements: XLA:CPU then compares them by
  vector instructions (4x).

  Args:
    shape: shape of the array.
    planes: number of planes.

  >>> plane_length((50257, 192), 100), plane_length((1000003,), 100)
  (96576, 10016)
  >>> plane_length((23, 33), 23), plane_length((700,), 23)
  (33, 31)
  """
  size = math.prod(shape)
  plain = -(-size // planes)
  if len(shape) > 1 and shape[-1] >= _MIN_MINOR:
    of_rows = -(-(size // shape[-1]) // planes) * shape[-1]
    if planes * of_rows - size <= size // _WASTE_DIVISOR:
      return of_rows
  if plain < _LONG:
    return plain
  return -(-plain // _MULTIPLE) * _MULTIPLE


def divisors(n: int) -> list[int]:
  """Returns the divisors of a positive integer.

  >>> sorted(divisors(12))
  [1, 2, 3, 4, 6, 12]
  """
  small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
  return small + [n // d for d in small]


def to_blocks(x: Array, planes: int, block: int) -> Array:
  """Divides `x` into f32[planes, blocks, width]; padding repeats its end."""
  shape = block_shape(x.shape, planes, block)
  flat = x.reshape(-1).astype(jnp.float32)
  if math.prod(shape) != x.size:
    rows = shape[0] * shape[1]
    flat = _pad_to_blocks(flat, rows, shape[2])
  return flat.reshape(shape)


def pad_to_multiple(flat: Array, unit: int) -> Array:
  """Returns a vector with zeros after its end, to a multiple of `unit`."""
  padding = -flat.size % unit
  return jnp.pad(flat, (0, padding)) if padding else flat


def cut_planes(x: Array, planes: int, block: int) -> list[tuple[slice, Array]]:
  """Divides `x` as `to_blocks` does, the planes without padding apart.

  >>> [(s.stop, b.shape) for s, b in cut_planes(jnp.zeros(9001), 4, 512)]
  [(3, (3, 5, 451)), (4, (1, 5, 451))]
  """
  # XLA:CPU writes a padded array to memory if several sums read it. In an array
  # of several planes only the last ones are padded.
  _, blocks, width = block_shape(x.shape, planes, block)
  length = blocks * width
  full = planes if x.size < _MIN_SLICED else x.size // length
  if full in (0, planes):
    return [(slice(0, planes), to_blocks(x, planes, block))]
  flat = x.reshape(-1).astype(jnp.float32)
  head = flat[: full * length].reshape(full, blocks, width)
  rest = planes - full
  if full * length == x.size:
    tail = jnp.broadcast_to(flat[-1], (rest * blocks, width))
  else:
    tail = _pad_to_blocks(flat[full * length :], rest * blocks, width)
  return [
    (slice(0, full), head),
    (slice(full, planes), tail.reshape(rest, blocks, width)),
  ]


def _pad_to_blocks(flat: Array, blocks: int, width: int) -> Array:
  """Cuts a vector into [blocks, width]; padding repeats its end."""
  # A gather rather than `jnp.pad`: XLA:CPU writes a padded array to memory
  # first, in a loop without vectors (7x). The gather takes whole slices where
  # it can, because an index for each element excludes vectors too (3x).
  size = flat.size
  full, rest = divmod(size, width)
  if size < _MIN_SLICED or not full:
    index = lax.iota(jnp.int32, blocks * width)
    held = jnp.minimum(index, size - 1)
    taken = flat.at[held].get(mode="promise_in_bounds")
    return taken.reshape(blocks, width)
  number = lax.iota(jnp.int32, blocks)[:, None]
  taken = lax.gather(
    flat,
    jnp.minimum(number, full - 1) * width,
    lax.GatherDimensionNumbers((1,), (), (0,)),
    (width,),
    mode="promise_in_bounds",
  )
  if rest:
    # Written apart, or each element of the array would ask whether it is here.
    last = hosts.pad_apart(flat[full * width :], width - rest, flat[-1])
    taken = jnp.where(number == full, last, taken)
  return jnp.where(number * width < size, taken, flat[-1])


def is_read_slowly(
  shape: tuple[int, ...], planes: int, blocks: int, width: int
) -> bool:
  """Returns whether XLA:CPU reads these blocks without vectors.

  Reading them in the array's shape takes a division once an element, unless
  planes and blocks are whole rows or whole fractions of one. Short rows, or few
  of them, gain nothing. Arrays that are too small or too large to be written
  apart first are not counted.

  Args:
    shape: shape of the array.
    planes: number of planes.
    blocks: blocks per plane.
    width: elements per block.

  >>> is_read_slowly((1 << 20,), 4, 512, 512)
  True
  >>> is_read_slowly((1024, 1024), 4, 512, 512)
  False
  """
  if not _MIN_APART <= planes * blocks * width <= _MAX_APART:
    return False
  minor = shape[-1] if len(shape) > 1 else 1
  rows = math.prod(shape) // max(1, minor)
  if minor < _MIN_MINOR or rows < _MIN_ROWS:
    return True
  return any(n % minor and minor % n for n in (blocks * width, width))


def read_blocks(
  decode: Callable[[PyTree, ShapedLike], Array],
  payload: PyTree,
  shape: tuple[int, int, int] | None,
  like: ShapedLike,
) -> Array:
  """Decodes a payload, block by block if that is faster."""
  if shape is None or not is_read_slowly(tuple(like.shape), *shape):
    return decode(payload, like)
  in_blocks = jax.ShapeDtypeStruct(shape, like.dtype)
  y = hosts.write_apart(lambda payload: decode(payload, in_blocks), payload)
  return y.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def from_blocks(y: Array, like: ShapedLike) -> Array:
  """Inverts `to_blocks`: drops the padding, restores shape and dtype."""
  # Finite levels beyond the dtype saturate.
  # Explicit axes let a reshape either join dimensions or split them.
  size = math.prod(like.shape)
  flat = y.reshape(-1)
  flat = flat if flat.size == size else flat[:size]
  return core.saturate_cast(flat.reshape(like.shape), like.dtype)


def block_counts(shape: tuple[int, ...], planes: int, block: int) -> np.ndarray:
  """Returns the number of elements under each scale, without padding.

  >>> block_counts((50,), 2, 20)[..., 0].tolist()
  [[13.0, 13.0], [13.0, 11.0]]
  """
  p, count, width = block_shape(shape, planes, block)
  size = math.prod(shape)
  start = np.arange(p * count) * width
  inside = np.clip(size - start, 0, width).reshape(p, count, 1)
  total = inside.sum(scale_axes(size, block), keepdims=True)
  return total.astype(np.float32)


def scale_axes(size: int, block: int) -> tuple[int, ...]:
  """Returns the axes (of planes, blocks, elements) that share one scale.

  >>> scale_axes(10, 512), scale_axes(1 << 16, 512)
  ((0, 1, 2), (2,))
  """
  # An array of at most one block has one scale for all planes together: a tiny
  # leaf would otherwise carry more scales than elements.
  return (0, 1, 2) if size <= block else (2,)


def max_magnitude(b: Array, axes: tuple[int, ...]) -> Array:
  """Returns the greatest |b|, keeping the axes; NaN if there is one."""
  greater = lambda x, y: jnp.maximum(jnp.abs(x), jnp.abs(y))
  return _reduce_blocks(_fold_lanes(b, axes, 0.0, greater), axes, greater)


def sum_magnitudes(b: Array, axes: tuple[int, ...]) -> Array:
  """Returns the sum of |b|, keeping the axes."""
  add = lambda x, y: jnp.abs(x) + jnp.abs(y)
  return _reduce_blocks(_fold_sums(b, axes), axes, add)


def min_element(b: Array, axes: tuple[int, ...]) -> Array:
  """Returns the least element, keeping the axes; NaN if there is one."""
  # Not `jnp.min` and `jnp.max`: over some axes XLA:CPU makes vector
  # instructions of them that lose a NaN.
  least = lambda x, y: jnp.where((x <= y) | jnp.isnan(x), x, y)
  return _reduce(_fold_lanes(b, axes, jnp.inf, least), axes, jnp.inf, least)


def max_element(b: Array, axes: tuple[int, ...]) -> Array:
  """Returns the greatest element, keeping the axes; NaN if there is one."""
  greatest = lambda x, y: jnp.where((x >= y) | jnp.isnan(x), x, y)
  folded = _fold_lanes(b, axes, -jnp.inf, greatest)
  return _reduce(folded, axes, -jnp.inf, greatest)


def reduce_blocks(
  x: Array,
  planes: int,
  block: int,
  reduce: Callable[[Array, tuple[int, ...]], Array],
  past_end: float | None = None,
) -> Array:
  """Reduces the elements under each scale, without the padding.

  >>> x = jnp.arange(50.0)
  >>> reduce_blocks(x, 2, 20, max_magnitude)[..., 0].tolist()
  [[12.0, 25.0], [38.0, 49.0]]
  """
  # `past_end` is the value of blocks past the end of the array; None stands for
  # that of a block of copies of the last element.
  # `to_blocks` is not called if there is padding: XLA:CPU would write the
  # padded array to memory for two readers, the reduction and the codes (3x).
  shape, axes = block_shape(x.shape, planes, block), scale_axes(x.size, block)
  if math.prod(shape) == x.size:
    return reduce(to_blocks(x, planes, block), axes)
  flat = x.reshape(-1).astype(jnp.float32)
  if axes != (2,):
    return reduce(flat.reshape(1, 1, -1), axes)
  full, rest = divmod(x.size, shape[2])
  cuts = [flat[: full * shape[2]].reshape(1, full, shape[2])]
  if rest:
    cuts.append(flat[full * shape[2] :].reshape(1, 1, rest))
  found = [reduce(cut, axes).reshape(-1) for cut in cuts]
  if past := shape[0] * shape[1] - full - bool(rest):
    last = reduce(flat[-1:].reshape(1, 1, 1), axes).reshape(1)
    last = last if past_end is None else jnp.full_like(last, past_end)
    found.append(jnp.broadcast_to(last, (past,)))
  return jnp.concatenate(found).reshape(*shape[:2], 1)


def _fold_lanes(
  b: Array,
  axes: tuple[int, ...],
  start: float,
  op: Callable[[Array, Array], Array],
) -> Array:
  """Reduces blocks to 32 elements each, by an op such as a maximum."""
  # XLA:CPU reduces a block by vector instructions only if 32 and more divide it
  # evenly (5x). Here runs of 32 are compared side by side. The last run
  # overlaps the one before it; XLA would join the reductions again if none did.
  width = b.shape[2]
  if axes != (2,) or width <= _LANES:
    return b
  runs = (width - 1) // _LANES
  side_by_side = lax.slice_in_dim(b, 0, runs * _LANES, axis=2)
  side_by_side = side_by_side.reshape(*b.shape[:2], runs, _LANES)
  folded = lax.reduce(side_by_side, np.float32(start), op, (2,))
  return op(folded, lax.slice_in_dim(b, width - _LANES, width, axis=2))


def _fold_sums(b: Array, axes: tuple[int, ...]) -> Array:
  """Adds up the magnitudes of each block to some partial sums."""
  # XLA:CPU adds a block element by element unless a power of two divides it
  # (4x). It writes a part of an array to memory before it reduces that part.
  # Here runs of some elements are added side by side. From 16 MiB on, blocks
  # that a power of two divides are faster as they are (1.3 to 1.7x).
  width = b.shape[2]
  if b.size >= _MIN_WHOLE_SUMS and not width & (width - 1):
    return b
  lanes = max(_SUM_LANES, 1 << (-(-width // _MAX_RUNS) - 1).bit_length())
  if axes != (2,) or width <= lanes:
    return b
  take = lambda start: jnp.abs(
    lax.slice_in_dim(b, start, start + lanes, axis=2)
  )
  full, rest = divmod(width, lanes)
  runs = [take(lanes * i) for i in range(full)]
  if rest:
    # The last run overlaps the one before it, whose elements do not count.
    lane = lax.broadcasted_iota(jnp.int32, (1, 1, lanes), 2)
    runs.append(jnp.where(lane >= lanes - rest, take(width - lanes), 0.0))
  return functools.reduce(jnp.add, runs)


def _reduce_blocks(
  b: Array, axes: tuple[int, ...], op: Callable[[Array, Array], Array]
) -> Array:
  # The reducer takes the magnitudes: if `jnp.abs` came before it, XLA:CPU would
  # write them to memory first (10x). Over axes of one element XLA drops the
  # reducer, which it takes to leave a single element as it is.
  return jnp.abs(_reduce(b, axes, 0.0, op))


def _reduce(
  b: Array,
  axes: tuple[int, ...],
  start: float,
  op: Callable[[Array, Array], Array],
) -> Array:
  return lax.expand_dims(lax.reduce(b, np.float32(start), op, axes), axes)
