"""Residuals: their description, their actions, and measures of them."""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.core import Array
from jaxmotion.memory import _memory_kind
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import _actions, _coder
from jaxmotion.program import Value

# Smaller arrays (statistics, scales, scalars) are saved exactly: encoding them
# would save few bytes.
_MIN_ELEMENTS = 2048
# Elements of a tile of `zero_value`. Each has its own room for nonzeros, so the
# fullest tile decides the capacity.
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
  partition: _coder.Partition | None = None
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
    return self.coder.nbytes

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

  @property
  def coder(self) -> _coder.Coder:
    """The functions that encode and decode it."""
    return _coder.make_coder(self.codec, self.kind, self.like, self.partition)


class ResidualTable:
  """The residual that each value of a joint program would be saved as."""

  def __init__(
    self,
    joint: trace.JointProgram,
    input_names: Sequence[str],
    choose: _actions.ResidualChoice,
    prefix: str,
    repeats: int,
  ):
    self._joint, self._choose, self.repeats = joint, choose, repeats
    self._kind = trace.classify_values(joint.program)
    self._name = trace.name_values(
      joint.program, input_names, self._kind, prefix
    )
    self._divisors = trace.find_divisors(joint.program)
    self._described: dict[Value, Residual] = {}

  def forward_values(self) -> list[Value]:
    """Returns the values that depend on no cotangent."""
    return [v for v in self._name if v not in self._joint.backward]

  def describe_exact(self, value: Value) -> Residual:
    """Returns a value as a residual that no codec rounds."""
    aval = value.aval
    return Residual(
      self._name[value],
      self._kind[value],
      tuple(aval.shape),
      aval.dtype,
      repeats=self.repeats,
      partition=_coder.find_partition(aval),
    )

  def describe(self, value: Value) -> Residual:
    """Returns a value as the residual that it would be saved as."""
    if value in self._described:
      return self._described[value]
    exact = residual = self.describe_exact(value)
    # Residuals of an inner scan were already encoded and placed by that
    # scan: leave them as they are. A stack on the host would otherwise be
    # fetched as a whole, then row by row: a transformer of 24 layers in 8
    # bits held 7076 MiB, and 2017 with the stack left where it is.
    if not (_memory_kind.is_on_host(value.aval) or exact.is_of_scan):
      residual = _apply_choice(exact, self._choose)
    if value in self._divisors and residual.may_round_to_zero:
      residual = residual._replace(codec=None)
    # Arguments of the function cannot be recomputed, so an action that might
    # require that leaves them as they are.
    needs_recompute = residual.recomputed or residual.may_overflow
    if value in self._joint.inputs and needs_recompute:
      residual = exact
    self._described[value] = residual
    return residual


def count_device_bytes(residuals: Iterable[Residual]) -> int:
  """Returns the encoded bytes of all residuals on the device."""
  return sum(r.encoded_bytes * r.repeats for r in residuals if not r.on_host)


def _apply_choice(
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
  return _encode_smaller(residual, action)


def _encode_smaller(residual: Residual, codec: codecs.Codec) -> Residual:
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


def fullest_tile_fraction(x: Array) -> Array:
  """Returns the largest fraction of nonzeros of any tile, float32[]."""
  # Tiles have 1024 elements of the flat array, as those of `zero_value`.
  flat = (x != 0).reshape(-1)
  tile = min(_TILE, flat.size)
  padding = -flat.size % tile
  tiles = jnp.pad(flat, (0, padding)).reshape(-1, tile)
  counts = jnp.sum(tiles, axis=1, dtype=jnp.int32)
  return jnp.max(counts).astype(jnp.float32) / tile


class Diagnostics(NamedTuple):
  """Overflows and measured sparsity of one forward pass."""

  overflows: Array  # Residuals whose nonzeros exceed the capacity, int32[].
  # Fraction of nonzeros of the fullest tile, float32[], by the name of a sparse
  # residual.
  fills: dict[str, Array]

  @classmethod
  def empty(cls) -> "Diagnostics":
    """Returns empty diagnostics: no overflow, no measured fill."""
    return cls(jnp.zeros((), jnp.int32), {})

  def merge(self, other: "Diagnostics") -> "Diagnostics":
    """Returns diagnostics with overflows added and fills merged."""
    return Diagnostics(
      self.overflows + other.overflows, {**self.fills, **other.fills}
    )

  def reduce_iterations(self) -> "Diagnostics":
    """Reduces stacks of `lax.scan`: sums overflows, takes the largest fill."""
    fills = {name: jnp.max(fill) for name, fill in self.fills.items()}
    return Diagnostics(jnp.sum(self.overflows, dtype=jnp.int32), fills)
