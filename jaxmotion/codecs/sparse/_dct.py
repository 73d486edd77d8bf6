"""The codec `dct`, a cosine transform of each tile."""

import dataclasses
import functools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.codecs.quantizers import _identity
from jaxmotion.codecs.sparse import _tile_layout
from jaxmotion.core import Array, PyTree, ShapedLike


@dataclasses.dataclass(frozen=True, kw_only=True)
class dct(_codec.Codec):
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

  summable: ClassVar[bool] = True
  linear: ClassVar[bool] = True

  chunk: int = 64
  fit: str = "pad"

  def __post_init__(self) -> None:
    core.check_int("chunk", self.chunk, 1, 256)
    core.check_choice("fit", self.fit, _tile_layout.FITS)

  @property
  def laws(self) -> _laws.Laws:
    """The laws of an orthogonal matrix, up to float32 rounding."""
    most = float(jnp.finfo(jnp.float32).max)
    return _laws.Laws(
      projects=True,
      contraction=1.0,
      bounds_memory=True,
      # The rounding of sums of `chunk` products, whose energy may end up in
      # one of chunk^2 elements.
      error=_laws.ErrorBound(
        peak=self.chunk**2 * 2.0**-22, floor=2.0**-126 * self.chunk**2
      ),
      largest=most / (4 * self.chunk**2),
      nonfinite="block",
    )

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[_identity.Values, PyTree]:
    """Returns float32[elements of a tile, tiles] and the state."""
    self._check_input(x, key, state)
    layout = _tile_layout.tile_layout(x, self.chunk, self.fit)
    down, across = _cosines(layout.height), _cosines(layout.width)
    y = _multiply(_multiply(down, _tile_layout.cut_tiles(x, layout)), across.T)
    return _identity.Values(
      y.reshape(-1, layout.height * layout.width).T
    ), state

  def decode(self, payload: _identity.Values, like: ShapedLike) -> Array:
    """Returns the matrix of the tiles, transformed back."""
    self._check_payload(payload, like)
    layout = _tile_layout.tile_layout(like, self.chunk, self.fit)
    down, across = _cosines(layout.height), _cosines(layout.width)
    y = payload.values.T.reshape(-1, layout.height, layout.width)
    matrix = _tile_layout.join_tiles(
      _multiply(_multiply(down.T, y), across), layout
    )
    return core.saturate_cast(matrix.reshape(like.shape), like.dtype)


@functools.lru_cache(maxsize=512)
def _cosines(length: int) -> np.ndarray:
  """Returns the matrix of the orthonormal DCT-II, float32."""
  frequency, position = np.ogrid[:length, :length]
  rows = np.cos(np.pi * (2 * position + 1) * frequency / (2 * length))
  rows *= np.sqrt(2 / length)
  rows[0] /= np.sqrt(2)
  return rows.astype(np.float32)


def _multiply(a: Array | np.ndarray, b: Array | np.ndarray) -> Array:
  # Accelerators multiply float32 in fewer bits by default. Matrices of a stack
  # are multiplied one by one.
  if a.ndim == 2:
    return jnp.einsum("ij,njk->nik", a, b, precision=lax.Precision.HIGHEST)
  return jnp.einsum("nij,jk->nik", a, b, precision=lax.Precision.HIGHEST)
