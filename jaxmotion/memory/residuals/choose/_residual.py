"""One residual: its description, its encoding and its decoding."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion.codecs import (
  Codec,
  cast,
  identity,
  nonnegative,
  truncate,
  zero_value,
)
from jaxmotion.core import (
  Array,
  Key,
  PyTree,
  from_bits,
  make_key,
  shape_string,
  to_bits,
)
from jaxmotion.memory.residuals.choose._actions import (
  ResidualChoice,
  offload,
  recompute,
)
from jaxmotion.memory.residuals.trace import pack_codes, unpack_codes

# Smaller arrays (statistics, scales, scalars) are saved exactly: encoding them
# would save few bytes.
_MIN_ELEMENTS = 2048
# Elements of a tile of `zero_value`, which has its own room for nonzeros.
_TILE = 1024

Buffers = list[Array]
"""The encoded buffers of one residual: what is saved of it."""


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
  """

  name: str
  kind: str
  shape: tuple[int, ...]
  dtype: Any
  codec: Codec | None = None
  on_host: bool = False
  recomputed: bool = False
  repeats: int = 1

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
    if not self._is_encoded():
      return self.nbytes
    buffers = jax.tree.leaves(self._payload_like())
    return sum(a.size * a.dtype.itemsize for a in buffers)

  @property
  def may_overflow(self) -> bool:
    """Whether its nonzeros may exceed the codec's capacity."""
    return isinstance(self.codec, zero_value) and self.codec.capacity < 1

  @property
  def is_lossy(self) -> bool:
    """Whether its codec rounds, so that decoding is not exact."""
    return not (
      self.codec is None or isinstance(self.codec, (identity, zero_value))
    )

  @property
  def may_round_to_zero(self) -> bool:
    """Whether its codec may make zeros of other elements."""
    if isinstance(self.codec, cast):
      # Narrow exponents have no room for small elements.
      return jnp.finfo(self.codec.dtype).minexp > -126
    return self.is_lossy and not isinstance(self.codec, nonnegative | truncate)

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
    if not self._is_encoded():
      return [x], None
    payload = self._make_payload(
      _differentiable_once(x) if self.is_float else x
    )
    overflow = payload.overflow if self.may_overflow else None
    return [_float_bits(a) for a in jax.tree.leaves(payload)], overflow

  def buffers_like(self) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of its encoded buffers."""
    return jax.eval_shape(lambda x: self.encode(x)[0], self.like)

  def decode(self, buffers: Buffers) -> Array:
    """Inverts `encode`, up to rounding."""
    if not self._is_encoded():
      return buffers[0]
    likes, tree = jax.tree.flatten(self._payload_like())
    pairs = zip(buffers, likes, strict=True)
    payload = jax.tree.unflatten(
      tree,
      [b if b.dtype == a.dtype else from_bits(b, a.dtype) for b, a in pairs],
    )
    if self.codec is not None:
      return self.codec.decode(payload, self.like)
    if self.kind == "mask":
      return unpack_codes(payload, 1, self.shape).astype(jnp.bool_)
    return payload

  def overflow_count(self, buffers: Buffers) -> Array:
    """Returns the number of nonzeros that had no room, from the buffers."""
    tree = jax.tree.structure(self._payload_like())
    return jax.tree.unflatten(tree, buffers).overflow

  def _is_encoded(self) -> bool:
    """Says whether the saved buffers are bits rather than the array itself.

    Floats that no codec encodes are saved as unsigned words too: XLA:CPU would
    keep a narrow float as float32, and nothing rounds a word.
    """
    if math.prod(self.shape) == 0:
      return False
    return self.kind in ("mask", "dense", "sparse")

  def _payload_like(self) -> PyTree:
    if self.codec is not None:
      return self.codec.payload_like(self.like)
    return jax.eval_shape(self._make_payload, self.like)

  def _make_payload(self, x: Array) -> PyTree:
    if self.codec is not None:
      return self.codec.encode(x, self.codec.init(x), _key_from_data(x))[0]
    if self.kind == "mask":
      return pack_codes(x, 1)
    return x


def apply_choice(residual: Residual, choose: ResidualChoice) -> Residual:
  """Returns the residual with the action that was chosen for it.

  Args:
    residual: an exact residual.
    choose: function of a residual that returns its action.

  Returns:
    The residual as it is for fewer than 2048 elements, and for a codec that
    would not make it smaller.

  Raises:
    TypeError: the action is none, or a codec that does not take the array.
    ValueError: the codec has state.
  """
  if math.prod(residual.shape) < _MIN_ELEMENTS:
    return residual
  action = choose(residual)
  if isinstance(action, recompute):
    return residual._replace(recomputed=True)
  if isinstance(action, offload):
    residual, action = residual._replace(on_host=True), action.codec
  if action is None:
    return residual
  return _with_codec(residual, action)


def _with_codec(residual: Residual, codec: Codec) -> Residual:
  """Returns the residual encoded by a codec, if that is smaller."""
  if not isinstance(codec, Codec):
    raise TypeError(
      "`codec` must give a Codec, `offload`, `recompute` or None for "
      f"{residual.name}, got {codec!r}."
    )
  if not residual.is_float:
    raise TypeError(
      f"`codec` must be None for {residual.name}, which is "
      f"{shape_string(residual.like)}, got {codec!r}."
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
      f"{shape_string(residual.like)}, got {codec!r}: {e}"
    ) from e
  return encoded if is_smaller else residual


@jax.custom_jvp
def _differentiable_once(x: Array) -> Array:
  """Returns `x` and refuses to be differentiated.

  The encoded buffers are bits, which have no derivative: without this, second
  derivatives would silently be zero.
  """
  return x


@_differentiable_once.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
  raise NotImplementedError(
    "A function wrapped in `compress_residuals` has no second derivatives: its "
    "saved residuals are bits. Wrap a function that is differentiated once."
  )


def fullest_tile_share(x: Array) -> Array:
  """Returns the largest share of nonzeros of any tile, float32[].

  Tiles have 1024 elements of the flat array, as those of `zero_value`.
  """
  flat = (x != 0).reshape(-1)
  tile = min(_TILE, flat.size)
  padding = -flat.size % tile
  tiles = jnp.pad(flat, (0, padding)).reshape(-1, tile)
  counts = jnp.sum(tiles, axis=1, dtype=jnp.int32)
  return jnp.max(counts).astype(jnp.float32) / tile


def _key_from_data(x: Array) -> Key:
  """Returns a random key made from some of the array's own bits.

  Rounding is then reproducible, and differs between steps and layers without
  a counter that the caller would have to pass.
  """
  words = _float_bits(_sample(x)).astype(jnp.uint32)
  # A sum, since a compiler that partitions the array cannot reduce by `xor`
  # over the devices.
  return make_key(jnp.sum(words, dtype=jnp.uint32))


def _sample(x: Array) -> Array:
  """Returns about 2048 elements or more, spread over the array.

  The first axis is thinned out only if it is the only one. It is the one that
  is most often partitioned, and a part of each device's rows is local.
  """
  to_drop = x.size // _MIN_ELEMENTS
  steps = [1] * x.ndim
  for axis in reversed(range(min(1, x.ndim - 1), x.ndim)):
    steps[axis] = max(1, min(to_drop, x.shape[axis]))
    to_drop //= steps[axis]
  return x[tuple(slice(None, None, step) for step in steps)]


def _float_bits(x: Array) -> Array:
  """Returns a float's bits as words; others, and float64, as they are."""
  is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4
  return to_bits(x) if is_narrow else x
