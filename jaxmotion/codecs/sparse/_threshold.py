"""The codec `threshold`: the elements above a magnitude."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import compact, pack


class Above(NamedTuple):
  """Payload of the first elements above the threshold and their positions.

  Attributes:
    values: float32[k], in order of position, zeros after the last.
    indices: uint32[rows, columns], positions in the array, packed in as many
      bits as its size needs; 0 after the last.
    count: uint32[], number of elements above the threshold; if it is more than
      k, the last count - k of them were dropped.
  """

  values: Array
  indices: Array
  count: Array  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, kw_only=True)
class threshold(_codec.Codec):
  """Keeps the elements of magnitude at or above a threshold, up to a capacity.

  encode(x) = the first k = max(1, round(capacity * n)) elements in order of
  position with |x| >= value, and their positions; decode puts them back among
  zeros.

  Properties: |x - decode(encode(x))| < value where count <= k, and what is kept
  is exact (to float32). A contraction, ||x - y||^2 = ||x||^2 - ||y||^2, which
  removes at least k value^2 if count > k: use it with `feedback`. Idempotent.
  On overflow (count > k) the elements at the highest positions are dropped,
  whatever their magnitude. With `feedback` they stay in the error and are sent
  once those before them leave room. A threshold that overflows at every step
  starves the end of the array: raise `value` or `capacity`. NaN counts as above
  any threshold, so it is sent on rather than hidden. If a non-finite element is
  among those that are dropped, the last element sent becomes NaN.

  Args:
    value: least magnitude that is sent, positive and finite.
    capacity: share of the elements that has a slot, in (0, 1].

  Example:
    >>> x = jnp.array([0.1, -3.0, 2.0, 0.5])
    >>> codec = threshold(value=1.0, capacity=0.5)
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist(), int(payload.count)
    ([0.0, -3.0, 2.0, 0.0], 2)

  References:
    Strom, *Scalable Distributed DNN Training Using Commodity GPU Cloud
    Computing*, 2015.
  """

  value: float
  capacity: float

  def __post_init__(self) -> None:
    core.check_number("value", self.value, 0, open_low=True)
    core.check_number("capacity", self.capacity, 0, 1, open_low=True)

  @property
  def laws(self) -> _laws.Laws:
    """The laws of a projection: only elements below the threshold are lost."""
    return _laws.Laws(
      keeps_zeros=True,
      keeps_finite=True,
      idempotent=True,
      projects=True,
      contraction=1.0,
      bounds_memory=True,
      error=_laws.ErrorBound(floor=self.value),
      nonfinite="element",
    )

  def _count_dropped(self, payload: Above, like: ShapedLike) -> Array:
    k, _ = self._slot_shape(like)
    return jnp.maximum(payload.count, k) - jnp.uint32(k)

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[Above, PyTree]:
    """Returns elements, positions and the count, and the state."""
    self._check_input(x, key, state)
    k, bits = self._slot_shape(x)
    flat = jnp.ravel(x).astype(jnp.float32)
    bitmap = compact.threshold_bitmap(x, self.value)
    before = compact.prefix_counts(bitmap)
    count = before[-1]
    filled = jnp.arange(k, dtype=jnp.int32) < count
    positions = jnp.where(
      filled, compact.bitmap_positions(bitmap, before, k), 0
    )
    values = flat.at[positions].get(mode="promise_in_bounds")
    values = jnp.where(filled, values, 0.0)
    # A non-finite element that finds no slot takes the last one's value, so
    # that no worker takes the step for a good one.
    lost = (~jnp.isfinite(flat)).sum() > (~jnp.isfinite(values)).sum()
    values = jnp.where(lost & (jnp.arange(k) == k - 1), jnp.nan, values)
    indices = pack.pack_flat(positions.astype(jnp.uint32), bits)
    return Above(values, indices, count.astype(jnp.uint32)), state

  def decode(self, payload: Above, like: ShapedLike) -> Array:
    """Returns zeros with the kept elements where they stood."""
    self._check_payload(payload, like)
    k, bits = self._slot_shape(like)
    positions = pack.unpack_flat(payload.indices, bits, k).astype(jnp.int32)
    flat = jnp.zeros(math.prod(like.shape), jnp.float32)
    # Empty slots add zero to the first element. Their values are not zero if a
    # codec that does not keep zeros encoded them.
    filled = jnp.arange(k, dtype=jnp.uint32) < payload.count
    values = jnp.where(filled, payload.values, 0.0)
    flat = flat.at[positions].add(values, mode="promise_in_bounds")
    return core.saturate_cast(flat.reshape(like.shape), like.dtype)

  def _slot_shape(self, like: ShapedLike) -> tuple[int, int]:
    """Returns (slots, bits of a position)."""
    size = math.prod(like.shape)
    k = min(size, max(1, round(self.capacity * size)))
    return k, max(1, (size - 1).bit_length())
