"""Public functions of compaction, which choose an implementation."""

import functools

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array
from jaxmotion.kernels import _checks, _dispatch
from jaxmotion.kernels.compact import _pallas_triton, _reference

# XLA:GPU searches for every slot what a kernel's threads just count, and
# scatters all that is dropped to one place.
_TABLE = {"reference": _reference, "pallas_triton": _pallas_triton}
_run = functools.partial(_dispatch.dispatch, _TABLE)
_MAX_TILE = 1024
_MAX_FLOAT = float(jnp.finfo(jnp.float32).max)


@core.declare(
  x=core.float_array, threshold=core.number(0, _MAX_FLOAT, open_low=True)
)
def threshold_bitmap(
  x: Array, threshold: float, *, implementation: str | None = None
) -> Array:
  """Marks the elements whose magnitude reaches a threshold, and NaN.

  Args:
    x: floating array of any shape.
    threshold: least magnitude that is marked, positive.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    A bitmap uint32[ceil(x.size / 32)]: bit i of word g stands for element
    32 g + i.

  Example:
    >>> import jax.numpy as jnp
    >>> threshold_bitmap(jnp.array([1.0, 0.5, -3.0]), 1.0).tolist()
    [5]
  """
  return _run(
    "threshold_bitmap", x, implementation=implementation, threshold=threshold
  )


def bitmap_positions(
  bitmap: Array,
  before: Array,
  capacity: int,
  *,
  implementation: str | None = None,
) -> Array:
  """Returns the positions of the first `capacity` marks, int32[capacity].

  Args:
    bitmap: uint32[words] from `threshold_bitmap`.
    before: int32[words + 1] from `prefix_counts`.
    capacity: static length of the result.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    Positions in ascending order, arbitrary after the last mark.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion.kernels.compact import prefix_counts
    >>> bitmap = threshold_bitmap(jnp.array([0.0, 1.0, 0.0, 1.0]), 1.0)
    >>> bitmap_positions(bitmap, prefix_counts(bitmap), 2).tolist()
    [1, 3]
  """
  _checks.check_words("bitmap", bitmap, ("words",), 32)
  if not hasattr(before, "dtype") or before.dtype != jnp.int32:
    raise TypeError(f"`before` must be int32[words + 1], got {before!r:.200}.")
  _checks.check_shape("before", before, (bitmap.size + 1,), "int32")
  core.integer(0, 32 * bitmap.size)("capacity", capacity)
  return _run(
    "bitmap_positions",
    bitmap,
    before,
    implementation=implementation,
    capacity=capacity,
  )


@core.declare(tile=core.integer(32, _MAX_TILE))
def compact_tiles(
  words: Array, tile: int, capacity: int, *, implementation: str | None = None
) -> _reference.NonZeros:
  """Packs the non-zero words of every tile, in their order.

  Tiles are independent. If a tile has more than `capacity` non-zero words, the
  last ones are dropped, and its count says how many there were.

  Args:
    words: uint8, uint16 or uint32[n], padded with zeros to whole tiles.
    tile: words per tile, a multiple of 32 up to 1024.
    capacity: maximum number of words kept of a tile, up to `tile`.
    implementation: name of the only implementation to try; None chooses one.

  Raises:
    ValueError: `tile` or `capacity` is out of range.

  Example:
    >>> import jax.numpy as jnp
    >>> tiles = compact_tiles(jnp.array([0, 7, 0, 8, 9], jnp.uint8), 32, 2)
    >>> tiles.mask.tolist(), tiles.words.tolist(), int(tiles.overflow)
    ([[26]], [[7, 8]], 1)
  """
  if tile % 32:
    raise ValueError(f"`tile` must be a multiple of 32, got {tile}.")
  core.integer(1, tile)("capacity", capacity)
  _checks.check_words("words", words, ("n",))
  return _run(
    "compact_tiles",
    words,
    implementation=implementation,
    tile=tile,
    capacity=capacity,
  )


@core.declare(
  tiles=core.instance(_reference.NonZeros, "the result of `compact_tiles`")
)
def expand_tiles(
  tiles: _reference.NonZeros, size: int, *, implementation: str | None = None
) -> Array:
  """Inverts `compact_tiles`; words that were dropped are zero.

  Args:
    tiles: result of `compact_tiles`.
    size: length of the result.
    implementation: name of the only implementation to try; None chooses one.

  Example:
    >>> import jax.numpy as jnp
    >>> tiles = compact_tiles(jnp.array([0, 7, 0, 8, 9], jnp.uint8), 32, 2)
    >>> expand_tiles(tiles, 5).tolist()
    [0, 7, 0, 8, 0]
  """
  _checks.check_words("tiles.mask", tiles.mask, ("tiles", "words"), 32)
  count = tiles.mask.shape[0]
  _checks.check_words("tiles.words", tiles.words, (count, "capacity"))
  _checks.check_words("tiles.count", tiles.count, (count,), 32)
  core.integer(0, 32 * tiles.mask.size)("size", size)
  return _run("expand_tiles", tiles, implementation=implementation, size=size)
