"""Linear codecs, which move or mix elements for a codec to follow."""

import abc
import dataclasses
import functools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmotion import core
from jaxmotion.codecs import _bases, _laws
from jaxmotion.codecs._arrays import _floats
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import rotate as rotations

_BLOCKS = (32, 64, 128, 256)
_FITS = ("pad", "divide")


def _orthogonal_laws(peak: float, floor: float, unit: int) -> _laws.Laws:
  """Returns the laws of an orthogonal matrix, up to float32 rounding."""
  return _laws.Laws(
    projects=True,
    contraction=1.0,
    bounds_memory=True,
    error=_laws.ErrorBound(peak=peak, floor=floor),
    largest=_laws.MAX_FLOAT32 / (4 * unit),
    nonfinite="block",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(block=core.choice(_BLOCKS), seed=core.seed)
class rotate(_bases.ArrayCodec):
  """Rotates each block by a random Hadamard matrix, for a codec to follow.

  encode(x) = H diag(s) x / sqrt(block) for each contiguous block, s = -1 or 1
  by a hash of (seed, position); decode(y) = diag(s) H y / sqrt(block). It does
  not compress by itself: in `chain(rotate(), uniform(bits=4))` it spreads
  outliers, so that max|y| of a block is about sqrt(2 log(2 block) / block)
  ||x|| whatever x.

  Properties: lossless up to float32 rounding, |decode(encode(x)) - x| <= 2^-13
  ||x|| of its block and 2^-21 ||x|| on typical data; preserves the norm up to
  the same; linear, and the same on all workers, so that payloads may be added
  (summable). A non-finite element makes its block decode to non-finite values,
  as may a block whose norm is near the end of float32.

  Args:
    block: 32, 64, 128 or 256. An array that is shorter is one block of the
      next power of two.
    seed: of the signs, 0 to 2^32 - 1.

  Example:
    >>> x = jnp.array([0.0, 8.0, 0.0, 0.0])
    >>> payload, _ = rotate().encode(x)
    >>> jnp.abs(payload.values).tolist(), rotate().decode(payload, x).tolist()
    ([[4.0, 4.0, 4.0, 4.0]], [0.0, 8.0, 0.0, 0.0])

  References:
    Suresh et al., *Distributed Mean Estimation with Limited Communication*,
    2017.
  """

  summable = True
  linear = True

  block: int = 128
  seed: int = 0

  def _make_laws(self) -> _laws.Laws:
    # Rounding of the sums of a block, whose energy may end up in one element.
    peak = 2.0**-13 * self.block**0.5
    floor = _laws.LEAST_FLOAT32 * self.block
    return _orthogonal_laws(peak, floor, self.block)

  def _encode(self, x: Array, key: core.Key | None) -> _floats.Values:
    return _floats.Values(rotations.rotate(x, self.block, self.seed))

  def _decode(self, payload: _floats.Values, like: ShapedLike) -> Array:
    return rotations.rotate_back(payload.values, like, self.seed)


class TileLayout(NamedTuple):
  """Division of a matrix into tiles of one shape."""

  rows: int  # Of the matrix, as are columns.
  columns: int
  height: int  # Of a tile, as is the width.
  width: int

  @property
  def counts(self) -> tuple[int, int]:
    """Number of tiles along both dimensions; the last may be padded."""
    return -(-self.rows // self.height), -(-self.columns // self.width)


class TileCodec(_bases.ArrayCodec):
  """Codec of the tiles of a matrix, of which each makes one column."""

  summable = True
  linear = True

  @abc.abstractmethod
  def _layout(self, like: ShapedLike) -> TileLayout:
    """Returns the tiles of an array."""

  def _mix(self, tiles: Array) -> Array:
    """Returns what is sent of float32[tiles, height, width]."""
    return tiles

  def _unmix(self, tiles: Array) -> Array:
    """Returns the tiles of what `_mix` made."""
    return tiles

  def _encode(self, x: Array, key: core.Key | None) -> _floats.Values:
    """Returns float32[elements of a tile, tiles]; zeros fill the last tiles."""
    layout = self._layout(x)
    (down, across), (rows, columns, height, width) = layout.counts, layout
    matrix = x.reshape(rows, columns).astype(jnp.float32)
    below, right = down * height - rows, across * width - columns
    if below or right:
      matrix = jnp.pad(matrix, ((0, below), (0, right)))
    tiles = matrix.reshape(down, height, across, width).transpose(0, 2, 1, 3)
    mixed = self._mix(tiles.reshape(-1, height, width))
    return _floats.Values(mixed.reshape(-1, height * width).T)

  def _decode(self, payload: _floats.Values, like: ShapedLike) -> Array:
    """Joins the tiles to the matrix, and drops what fills the last ones."""
    layout = self._layout(like)
    (down, across), (rows, columns, height, width) = layout.counts, layout
    tiles = self._unmix(payload.values.T.reshape(-1, height, width))
    matrix = tiles.reshape(down, across, height, width).transpose(0, 2, 1, 3)
    matrix = matrix.reshape(down * height, across * width)[:rows, :columns]
    return core.saturate_cast(matrix.reshape(like.shape), like.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  chunk=core.integer(1, 2**31 - 1),
  fit=core.choice(_FITS),
  shape=core.choice(("square", "row")),
)
class tiles(TileCodec):
  """Cuts a matrix into tiles, one in each column, for a codec to follow.

  encode(x) = the tiles of x as columns of a matrix, row by row of a tile. A
  codec that treats columns alike then treats tiles alike:
  `chain(tiles(chunk=64), topk_columns(count=32))` keeps 32 elements of each
  64 x 64 tile. A vector has tiles of one row. An array of more dimensions is a
  matrix of its last dimension by all others.

  Properties: lossless, but for zeros that fill tiles; linear, and the same on
  all workers (summable).

  Args:
    chunk: greatest length of a side of a tile.
    fit: what happens where `chunk` does not divide a dimension. "pad" cuts it
      into as many parts as it has to, of equal lengths, and fills the last one
      with zeros. "divide" takes the greatest divisor that is at most `chunk`,
      which is 1 for a prime number.
    shape: "square", or "row" for tiles that are the rows of a matrix. Vectors
      are cut by `chunk` in both.

  Example:
    >>> x = jnp.arange(8.0).reshape(2, 4)
    >>> tiles(chunk=2).encode(x)[0].values.T.tolist()
    [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
  """

  chunk: int = 64
  fit: str = "pad"
  shape: str = "square"

  laws = _laws.PERMUTED

  def _layout(self, like: ShapedLike) -> TileLayout:
    if self.shape == "row" and len(like.shape) > 1:
      rows, columns = math.prod(like.shape[:-1]), like.shape[-1]
      return TileLayout(rows, columns, 1, max(1, columns))
    return tile_layout(like, self.chunk, self.fit)


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(chunk=core.integer(1, 256), fit=core.choice(_FITS))
class dct(TileCodec):
  """Transforms each tile of a matrix by cosines, for a codec to follow.

  encode(x) = the orthonormal cosine transform (DCT-II) of every tile, in both
  dimensions, as columns like those of `tiles`. It does not compress by itself:
  in `chain(dct(), topk_columns(count=32))` the energy of a tile is in few
  elements.

  Properties: lossless up to float32 rounding; preserves the norm up to the
  same; linear, and the same on all workers (summable). A non-finite element
  makes its tile decode to non-finite values.

  Args:
    chunk: greatest length of a side of a tile, 1 to 256.
    fit: "pad" or "divide", where `chunk` does not divide a dimension; see
      `tiles`.

  Example:
    >>> x = jnp.ones((2, 4))
    >>> payload, _ = dct(chunk=2).encode(x)
    >>> jnp.round(payload.values, 4).T.tolist()
    [[2.0, 0.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]

  References:
    Peng et al., *DeMo: Decoupled Momentum Optimization*, 2024.
  """

  chunk: int = 64
  fit: str = "pad"

  def _make_laws(self) -> _laws.Laws:
    # The rounding of sums of `chunk` products, whose energy may end up in one
    # of chunk^2 elements.
    square = self.chunk**2
    floor = _laws.LEAST_FLOAT32 * square
    return _orthogonal_laws(square * 2.0**-22, floor, square)

  def _layout(self, like: ShapedLike) -> TileLayout:
    return tile_layout(like, self.chunk, self.fit)

  def _mix(self, tiles: Array) -> Array:
    down, across = map(_cosines, tiles.shape[1:])
    return _multiply_tiles(_multiply_tiles(down, tiles), across.T)

  def _unmix(self, tiles: Array) -> Array:
    down, across = map(_cosines, tiles.shape[1:])
    return _multiply_tiles(_multiply_tiles(down.T, tiles), across)


@functools.lru_cache(maxsize=512)
def _cosines(length: int) -> np.ndarray:
  """Returns the matrix of the orthonormal DCT-II, float32."""
  frequency, position = np.ogrid[:length, :length]
  rows = np.cos(np.pi * (2 * position + 1) * frequency / (2 * length))
  rows *= np.sqrt(2 / length)
  rows[0] /= np.sqrt(2)
  return rows.astype(np.float32)


def _multiply_tiles(a: Array | np.ndarray, b: Array | np.ndarray) -> Array:
  """Multiplies a matrix and each matrix of a stack, in either order."""
  # Accelerators multiply float32 in fewer bits by default.
  product = "ij,njk->nik" if a.ndim == 2 else "nij,jk->nik"
  return jnp.einsum(product, a, b, precision="highest")


def tile_layout(like: ShapedLike, chunk: int, fit: str) -> TileLayout:
  """Returns the tiles of an array: those of a vector have one row.

  >>> from jax import ShapeDtypeStruct as like
  >>> tile_layout(like((12, 130), "float32"), 64, "pad")
  TileLayout(rows=12, columns=130, height=12, width=44)
  >>> tile_layout(like((12, 130), "float32"), 64, "divide").width
  26
  """
  # An array of more than two dimensions is a matrix of its last dimension by
  # all others.
  columns = like.shape[-1] if like.shape else 1
  rows = math.prod(like.shape[:-1])

  def side_of(length: int) -> int:
    """Returns the length of a tile's side along a dimension of this length."""
    if length <= chunk:
      return max(1, length)
    if fit == "pad":  # As many equal sides as it takes.
      return -(-length // -(-length // chunk))
    return max(d for d in range(1, chunk + 1) if length % d == 0)

  return TileLayout(rows, columns, side_of(rows), side_of(columns))
