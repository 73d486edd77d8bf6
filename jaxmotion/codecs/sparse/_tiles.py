"""The codec `tiles`, which puts the elements of each tile in one column."""

import dataclasses
from typing import Any, ClassVar

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.codecs.quantizers import _identity
from jaxmotion.codecs.sparse import _tile_layout
from jaxmotion.core import Array, PyTree, ShapedLike

_MAX_CHUNK = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class tiles(_codec.Codec):
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
    >>> import jax.numpy as jnp
    >>> x = jnp.arange(8.0).reshape(2, 4)
    >>> tiles(chunk=2).encode(x)[0].values.T.tolist()
    [[0.0, 1.0, 4.0, 5.0], [2.0, 3.0, 6.0, 7.0]]
  """

  summable: ClassVar[bool] = True
  linear: ClassVar[bool] = True

  chunk: int = 64
  fit: str = "pad"
  shape: str = "square"

  def __post_init__(self) -> None:
    core.check_int("chunk", self.chunk, 1, _MAX_CHUNK)
    core.check_choice("fit", self.fit, _tile_layout.FITS)
    core.check_choice("shape", self.shape, ("square", "row"))

  @property
  def laws(self) -> _laws.Laws:
    """The laws of a permutation of float32 elements."""
    return dataclasses.replace(_laws.LOSSLESS, projects=True)

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[_identity.Values, PyTree]:
    """Returns float32[elements of a tile, tiles] and the state."""
    self._check_input(x, key, state)
    layout = self._layout(x)
    columns = (
      _tile_layout.cut_tiles(x, layout)
      .reshape(-1, layout.height * layout.width)
      .T
    )
    return _identity.Values(columns), state

  def decode(self, payload: _identity.Values, like: ShapedLike) -> Array:
    """Returns the matrix of the tiles."""
    self._check_payload(payload, like)
    layout = self._layout(like)
    cut = payload.values.T.reshape(-1, layout.height, layout.width)
    return core.saturate_cast(
      _tile_layout.join_tiles(cut, layout).reshape(like.shape), like.dtype
    )

  def _layout(self, like: Any) -> _tile_layout.TileLayout:
    return _tile_layout.tile_layout(
      like, self.chunk, self.fit, whole_rows=self.shape == "row"
    )
