"""One residual: its description, its encoding and its decoding."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.core import Array
from jaxmotion.memory.residuals.choose import _actions, _partition
from jaxmotion.memory.residuals.choose._coder import (
  Buffers,
  Coder,
  make_coder,
)

# Smaller arrays (statistics, scales, scalars) are saved exactly: encoding them
# would save few bytes.
_MIN_ELEMENTS = 2048
# Elements of a tile of `zero_value`, which has its own room for nonzeros.
_TILE = 1024


class Residual(NamedTuple):
  """One array that is saved for the backward pass, and how.

  Attributes:
    name: "kind/label"; see `residuals_of`.
    kind: "mask", "integer", "sparse", "dense" or "other".
    shape: shape of the array.
    dtype: dtype of the array.
    codec: codec it is encoded by; None saves it exactly, a mask as bits.
    on_host: whether its buffers go to host memory.
    recomputed: whether it is recomputed instead of saved.
    repeats: number of such arrays, one for each iteration of a loop.
    partition: how the array lies on a mesh; None if one device holds it.
    kept: whether it is saved even where it could be recomputed.
  """

  name: str
  kind: str
  shape: tuple[int, ...]
  dtype: Any
  codec: codecs.Codec | None = None
  on_host: bool = False
  recomputed: bool = False
  repeats: int = 1
  partition: _partition.Partition | None = None
  kept: bool = False

  @property
  def like(self) -> jax.ShapeDtypeStruct:
    """The shape and dtype of the array."""
    return jax.ShapeDtypeStruct(self.shape, self.dtype)

  @property
  def is_float(self) -> bool:
    """Whether it holds floats, which a codec can encode."""
    return self.kind in ("dense", "sparse")

  @property
  def is_of_scan(self) -> bool:
    """Whether it is an integer or mask array of a loop.

    Encoded buffers that an inner loop saved or carried are such arrays. The
    test is by name, so integers and masks of the loop's own body count too:
    no action applies to them, and they are saved on the device.
    """
    return re.match(r"(integer|mask)/.*scan_", self.name) is not None

  @property
  def nbytes(self) -> int:
    """The bytes of the array as it is computed."""
    # Extended dtypes may have no item size: they count 8 bytes an element.
    itemsize = getattr(self.dtype, "itemsize", 8)
    return math.prod(self.shape) * int(itemsize)

  @property
  def encoded_bytes(self) -> int:
    """The bytes of its encoded buffers."""
    return self._coder.nbytes

  @property
  def is_computed(self) -> bool:
    """Whether its buffers are not the array itself, read as other bits."""
    return self.codec is not None or self.kind == "mask"

  @property
  def may_overflow(self) -> bool:
    """Whether its nonzeros may exceed the codec's capacity."""
    return isinstance(self.codec, codecs.zero_value) and self.codec.capacity < 1

  @property
  def is_lossy(self) -> bool:
    """Whether its codec rounds, so that decoding is not exact."""
    return not (
      self.codec is None
      or isinstance(self.codec, (codecs.identity, codecs.zero_value))
    )

  @property
  def may_round_to_zero(self) -> bool:
    """Whether its codec may make zeros of other elements."""
    if isinstance(self.codec, codecs.cast):
      # Narrow exponents have no room for small elements.
      return jnp.finfo(self.codec.dtype).minexp > -126
    return self.is_lossy and not isinstance(
      self.codec, codecs.nonnegative | codecs.truncate
    )

  @property
  def is_exact(self) -> bool:
    """Whether decoding always gives the array, bit for bit."""
    return not (self.is_lossy or self.may_overflow)

  def encode(self, x: Array) -> tuple[Buffers, Array | None]:
    """Encodes the residual's array.

    Returns:
      The encoded buffers, and the number of nonzeros without room, int32[];
      None where every array has room.
    """
    buffers = self._coder.encode(x)
    overflow = self.overflow_count(buffers) if self.may_overflow else None
    return buffers, overflow

  def buffers_like(self) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of its encoded buffers."""
    return self._coder.likes

  def decode(self, buffers: Buffers) -> Array:
    """Inverts `encode`, up to rounding."""
    return self._coder.decode(buffers)

  def overflow_count(self, buffers: Buffers) -> Array:
    """Returns the number of nonzeros that had no room, from the buffers."""
    return self._coder.overflow_count(buffers)

  @property
  def _coder(self) -> Coder:
    return make_coder(
      self.codec, self.kind, self.shape, self.dtype, self.partition
    )


def apply_choice(
  residual: Residual, choose: _actions.ResidualChoice
) -> Residual:
  """Returns the residual with the action that was chosen for it."""
  if math.prod(residual.shape) < _MIN_ELEMENTS:
    return residual
  action = choose(residual)
  if isinstance(action, _actions.recompute):
    return residual._replace(recomputed=True)
  if isinstance(action, _actions.save):
    residual, action = residual._replace(kept=True), action.codec
  if isinstance(action, _actions.offload):
    residual, action = residual._replace(on_host=True), action.codec
  if action is None:
    return residual
  return _with_codec(residual, action)


def _with_codec(residual: Residual, codec: codecs.Codec) -> Residual:
  """Returns the residual encoded by a codec, if that is smaller."""
  if not isinstance(codec, codecs.Codec):
    raise TypeError(
      "`codec` must give a Codec, `offload`, `recompute` or None for "
      f"{residual.name}, got {codec!r}."
    )
  if not residual.is_float:
    raise TypeError(
      f"`codec` must be None for {residual.name}, which is "
      f"{core.shape_string(residual.like)}, got {codec!r}."
    )
  if codec.is_tree:
    raise TypeError(
      f"`codec` must be a codec of arrays for {residual.name}, got {codec!r}."
    )
  if codec.has_state:
    raise ValueError(
      f"`codec` must be a codec without state for {residual.name}, got "
      f"{codec!r}."
    )
  encoded = residual._replace(codec=codec)
  try:
    is_smaller = encoded.encoded_bytes < residual.nbytes
  except TypeError as e:
    raise TypeError(
      f"`codec` must take {residual.name}, which is "
      f"{core.shape_string(residual.like)}, got {codec!r}: {e}"
    ) from e
  return encoded if is_smaller else residual


def fullest_tile_share(x: Array) -> Array:
  """Returns the largest share of nonzeros of any tile, float32[]."""
  # Tiles have 1024 elements of the flat array, as those of `zero_value`.
  flat = (x != 0).reshape(-1)
  tile = min(_TILE, flat.size)
  padding = -flat.size % tile
  tiles = jnp.pad(flat, (0, padding)).reshape(-1, tile)
  counts = jnp.sum(tiles, axis=1, dtype=jnp.int32)
  return jnp.max(counts).astype(jnp.float32) / tile
