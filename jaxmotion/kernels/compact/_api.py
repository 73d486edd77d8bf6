"""Compaction: the implementation is chosen here."""

from typing import Any

from jaxmotion.core import Array, PyTree, check_int
from jaxmotion.kernels._dispatch import run
from jaxmotion.kernels.compact._tiles import NonZeros

# XLA:GPU searches for every slot what a kernel's threads just count, and
# scatters all that is dropped to one place.
_GPU = ("pallas_triton",)
_MOST_TILE = 1024


def mark(x: Array, least: float, *, implementation: str | None = None) -> Array:
  """Marks the values of magnitude at or above `least`, and NaN.

  Args:
    x: floating array of any shape.
    least: positive.
    implementation: the only one to try, by name; None chooses.

  Returns:
    A bitmap uint32[ceil(x.size / 32)], bit i of word g for value 32 g + i.

  Example:
    >>> import jax.numpy as jnp
    >>> mark(jnp.array([1.0, 0.5, -3.0]), 1.0).tolist()
    [5]
  """
  return _run("mark", implementation, x, least=least)


def select(
  bitmap: Array,
  start: Array,
  capacity: int,
  *,
  implementation: str | None = None,
) -> Array:
  """Returns the positions of the first `capacity` marks, int32[capacity].

  Args:
    bitmap: uint32[words] from `mark`.
    start: int32[words + 1] from `starts`.
    capacity: static length of the result.
    implementation: the only one to try, by name; None chooses.

  Returns:
    Positions, arbitrary ones after the last mark.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion.kernels.compact import starts
    >>> bitmap = mark(jnp.array([0.0, 1.0, 0.0, 1.0]), 1.0)
    >>> select(bitmap, starts(bitmap), 2).tolist()
    [1, 3]
  """
  return _run("select", implementation, bitmap, start, capacity=capacity)


def compact_tiles(
  words: Array, tile: int, capacity: int, *, implementation: str | None = None
) -> NonZeros:
  """Packs the words of every tile that are not zero, in their order.

  Tiles are compacted by themselves. Of one that has more than `capacity` such
  words the last are dropped, and its count says how many there were.

  Args:
    words: uint8, uint16 or uint32[n], padded with zeros to whole tiles.
    tile: words in a tile, a multiple of 32 up to 1024.
    capacity: words of a tile that have room, up to `tile`.
    implementation: the only one to try, by name; None chooses.

  Raises:
    ValueError: `tile` or `capacity` is out of range.

  Example:
    >>> import jax.numpy as jnp
    >>> tiles = compact_tiles(jnp.array([0, 7, 0, 8, 9], jnp.uint8), 32, 2)
    >>> tiles.mask.tolist(), tiles.words.tolist(), int(tiles.overflow)
    ([[26]], [[7, 8]], 1)
  """
  check_int("tile", tile, 32, _MOST_TILE)
  if tile % 32:
    raise ValueError(f"`tile` must be a multiple of 32, got {tile}.")
  check_int("capacity", capacity, 1, tile)
  return _run(
    "compact_tiles", implementation, words, tile=tile, capacity=capacity
  )


def expand_tiles(
  tiles: NonZeros, size: int, *, implementation: str | None = None
) -> Array:
  """Inverts `compact_tiles`; words that were dropped are zero.

  Args:
    tiles: from `compact_tiles`.
    size: length of the result.
    implementation: the only one to try, by name; None chooses.

  Example:
    >>> import jax.numpy as jnp
    >>> tiles = compact_tiles(jnp.array([0, 7, 0, 8, 9], jnp.uint8), 32, 2)
    >>> expand_tiles(tiles, 5).tolist()
    [0, 7, 0, 8, 0]
  """
  return _run("expand_tiles", implementation, tiles, size=size)


def _run(
  op: str, implementation: str | None, *args: PyTree, **static: Any
) -> PyTree:
  return run(
    "compact", op, *args, gpu=_GPU, implementation=implementation, **static
  )
