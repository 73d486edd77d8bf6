"""Division of matrices into tiles."""

import math
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion.core import Array, ShapedLike

FITS = ("pad", "divide")


class TileLayout(NamedTuple):
  """Division of a matrix into tiles of one shape.

  Attributes:
    rows: rows of the matrix.
    columns: columns of the matrix.
    height: rows of a tile.
    width: columns of a tile.
  """

  rows: int
  columns: int
  height: int
  width: int

  @property
  def counts(self) -> tuple[int, int]:
    """Number of tiles along both dimensions; the last may be padded."""
    return -(-self.rows // self.height), -(-self.columns // self.width)


def tile_layout(
  like: ShapedLike, chunk: int, fit: str, *, whole_rows: bool = False
) -> TileLayout:
  """Returns the tiles of an array: those of a vector have one row.

  An array of more than two dimensions is a matrix of its last dimension by all
  others.

  Args:
    like: shape and dtype of the array.
    chunk: greatest length of a side of a tile.
    fit: "pad" or "divide", as for `tiles`.
    whole_rows: whether each row of a matrix is one tile.

  >>> from jax import ShapeDtypeStruct as like
  >>> tile_layout(like((12, 130), "float32"), 64, "pad")
  TileLayout(rows=12, columns=130, height=12, width=44)
  >>> tile_layout(like((12, 130), "float32"), 64, "divide").width
  26
  """
  columns = like.shape[-1] if like.shape else 1
  rows = math.prod(like.shape[:-1])
  if whole_rows and len(like.shape) > 1:
    return TileLayout(rows, columns, 1, max(1, columns))
  side = _padded_side if fit == "pad" else _divisor_side
  return TileLayout(rows, columns, side(rows, chunk), side(columns, chunk))


def cut_tiles(x: Array, layout: TileLayout) -> Array:
  """Returns float32[tiles, height, width], with zeros where a tile is
  padded."""
  (down, across), (_, _, height, width) = layout.counts, layout
  matrix = x.reshape(layout.rows, layout.columns).astype(jnp.float32)
  below, right = (
    down * height - layout.rows,
    across * width - layout.columns,
  )
  if below or right:
    matrix = jnp.pad(matrix, ((0, below), (0, right)))
  tiles = matrix.reshape(down, height, across, width)
  return tiles.transpose(0, 2, 1, 3).reshape(-1, height, width)


def join_tiles(tiles: Array, layout: TileLayout) -> Array:
  """Returns the matrix of these tiles: inverts `cut_tiles`."""
  # `tiles`: float32[tiles, height, width].
  (down, across), (_, _, height, width) = layout.counts, layout
  matrix = tiles.reshape(down, across, height, width).transpose(0, 2, 1, 3)
  matrix = matrix.reshape(down * height, across * width)
  return matrix[: layout.rows, : layout.columns]


def _padded_side(length: int, chunk: int) -> int:
  """Returns the length of equal parts, of which one may be padded."""
  if length <= chunk:
    return max(1, length)
  return -(-length // -(-length // chunk))


def _divisor_side(length: int, chunk: int) -> int:
  """Returns the greatest divisor of a length that is at most `chunk`."""
  if length <= chunk:
    return max(1, length)
  return max(d for d in range(1, chunk + 1) if length % d == 0)
