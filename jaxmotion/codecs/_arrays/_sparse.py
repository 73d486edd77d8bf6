"""Codecs that send some elements, by their size or at random."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import _bases, _checks, _laws
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import compact, pack, select

_TILES = (32, 64, 128, 256, 512, 1024)


class Sampled(NamedTuple):
  """Payload of sampled elements and the seed of their positions."""

  values: Array  # float32[k], in order of position.
  seed: Array  # uint32[], equal on all workers.


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(density=_checks.FRACTION, scaled=core.boolean)
class random_k(_bases.ArrayCodec):
  """Keeps k elements at random positions, the same on all workers.

  The array is divided into k = max(1, round(density * n)) contiguous runs of
  m_i values. Here m_i = floor(n / k) or ceil(n / k); `key.shared` draws one
  position p_i of each. encode(x)_i = m_i x[p_i] (x[p_i] if not `scaled`);
  decode puts them back among zeros. Each element is drawn with probability 1 /
  m_i, k / n where k divides n, up to 2^-32; never twice.

  Properties: summable; linear in x under one key. Scaled it is unbiased with
  E||y - x||^2 = sum (m_i - 1) x^2 <= (ceil(n / k) - 1) ||x||^2. Not scaled it
  is a contraction: ||x - y||^2 = ||x||^2 - ||y||^2, at most
  (1 - 1 / ceil(n / k)) ||x||^2 in expectation, so use it with `feedback`.
  Lossless at density 1. A non-finite element is sent on if it is drawn, and a
  product m_i x beyond float32 is sent as infinity.

  Args:
    density: share of the elements that is sent, in (0, 1].
    scaled: divide by the probability of being drawn.

  Example:
    >>> from jaxmotion.core import make_key
    >>> x = jnp.ones(8)
    >>> codec = random_k(density=0.25)
    >>> payload, _ = codec.encode(x, (), make_key(0))
    >>> payload.values.tolist(), float(codec.decode(payload, x).sum())
    ([4.0, 4.0], 8.0)

  References:
    Stich, Cordonnier and Jaggi, *Sparsified SGD with Memory*, 2018. Wangni et
    al., *Gradient Sparsification for Communication-Efficient Distributed
    Optimization*, 2018 (unbiased by the inverse probability).
  """

  summable = True
  needs_key = True

  density: float
  scaled: bool = True

  def _make_laws(self) -> _laws.Laws:
    """States the laws of sampling, from the length of a run."""
    # Most elements of a run of which one is drawn: the number of runs is
    # rounded, by up to a third where it is small.
    run = math.ceil(1.5 / self.density) if self.density < 1 else 1
    scale = run if self.scaled else 1
    is_whole = self.density == 1
    return _laws.Laws(
      keeps_zeros=True,
      keeps_finite=scale == 1,
      unbiased=self.scaled,
      projects=scale == 1,
      contraction=1 / run if scale == 1 else 0.0,
      bounds_memory=scale == 1,
      error=_laws.ErrorBound(
        relative=0.0 if is_whole else max(1.0, scale - 1.0),
        floor=_laws.LEAST_FLOAT32,
      ),
      largest=_laws.MAX_FLOAT32 / scale,
      nonfinite="element" if is_whole else "lost",
    )

  def _encode(self, x: Array, key: core.Key | None) -> Sampled:
    """Returns the sampled elements, scaled, and the seed of their positions."""
    assert key is not None
    k = self._sample_size(x)
    flat = jnp.ravel(x).astype(jnp.float32)
    positions = select.draw_stratified(key.shared, x.size, k)
    values = flat.at[positions].get(mode="promise_in_bounds")
    if self.scaled and k < x.size:
      values = values * select.stratum_sizes(x.size, k).astype(jnp.float32)
    return Sampled(values, key.shared)

  def _decode(self, payload: Sampled, like: ShapedLike) -> Array:
    """Draws the positions again and puts the elements there."""
    size = math.prod(like.shape)
    positions = select.draw_stratified(
      payload.seed, size, self._sample_size(like)
    )
    flat = jnp.zeros(size, jnp.float32)
    flat = flat.at[positions].set(
      payload.values,
      mode="promise_in_bounds",
      indices_are_sorted=True,
      unique_indices=True,
    )
    return core.saturate_cast(flat.reshape(like.shape), like.dtype)

  def _sample_size(self, like: ShapedLike) -> int:
    size = math.prod(like.shape)
    return min(size, max(1, round(self.density * size)))


class Above(NamedTuple):
  """Payload of the first elements above the threshold and their positions."""

  # float32[k], in order of position, zeros after the last.
  values: Array
  # uint32[rows, columns], positions in the array, packed in as many bits as its
  # size needs; 0 after the last.
  indices: Array
  # uint32[], number of elements above the threshold; if it is more than k, the
  # last count - k of them were dropped.
  count: Array  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(value=core.number(0, open_low=True), capacity=_checks.FRACTION)
class threshold(_bases.ArrayCodec):
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

  def _make_laws(self) -> _laws.Laws:
    """States the laws of elements that are exact or below the threshold."""
    return dataclasses.replace(
      _laws.ROUNDED,
      projects=True,
      contraction=1.0,
      error=_laws.ErrorBound(floor=self.value),
      nonfinite="element",
    )

  def _count_dropped(self, payload: Above, like: ShapedLike) -> Array:
    k, _ = self._slot_shape(like)
    return jnp.maximum(payload.count, k) - jnp.uint32(k)

  def _encode(self, x: Array, key: core.Key | None) -> Above:
    """Returns the first elements above the threshold and their positions."""
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
    return Above(values, indices, count.astype(jnp.uint32))

  def _decode(self, payload: Above, like: ShapedLike) -> Array:
    """Puts the elements of filled slots at their positions."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(capacity=_checks.FRACTION, tile=core.choice(_TILES))
class zero_value(_bases.ArrayCodec):
  """Leaves out the zeros that ReLU and pruning produce, without loss (ZVC).

  encode(x) = for each tile of the flat array, (bits(x) != 0, the first k
  non-zero words in order, their number), k = max(1, round(capacity * tile)).
  Decode puts the words back among zeros.

  Properties: lossless bit for bit where `payload.overflow` is 0, NaN, infinity,
  subnormals and -0.0 (whose sign bit is a word that is not zero) included;
  idempotent. If more than k words of a tile are not zero, the last ones in
  order decode to zero. The tile's count says how many there were. A caller who
  needs the exact values reads the overflow and takes another way (recompute,
  send plainly). The ratio is 1 / (capacity + 1/32 + 1/tile) in float32. At a
  share s of zeros that are spread at random, a tile has (1 - s) tile other
  values. Their standard deviation is sqrt(s (1 - s) tile). So give the capacity
  some such deviations more than 1 - s.

  Args:
    capacity: share of a tile's elements that has a slot, in (0, 1]; 1 never
      overflows.
    tile: number of elements compacted together, a power of two from 32 to 1024.
      An array of fewer elements is one tile.

  Example:
    >>> x = jnp.array([0.0, 2.0, 0.0, -1.0])
    >>> codec = zero_value(capacity=0.5)
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist(), int(payload.overflow)
    ([0.0, 2.0, 0.0, -1.0], 0)

  References:
    Rhu et al., *Compressing DMA Engine: Leveraging Activation Sparsity for
    Training Deep Neural Networks*, 2018.
  """

  laws = _laws.LOSSLESS  # Its words are no projection.
  keeps_dtype = True

  capacity: float
  tile: int = 1024

  def _count_dropped(
    self, payload: compact.NonZeros, like: ShapedLike
  ) -> Array:
    return payload.overflow

  def _encode(self, x: Array, key: core.Key | None) -> compact.NonZeros:
    """Returns mask, words and count of every tile."""
    words = core.to_bits(x).reshape(-1)
    size = min(self.tile, math.prod(x.shape))  # Elements of a tile.
    padded = max(32, math.ceil(size / 32) * 32)  # The mask has whole words.
    slots = max(1, round(self.capacity * size))
    return compact.compact_tiles(words, padded, slots)

  def _decode(self, payload: compact.NonZeros, like: ShapedLike) -> Array:
    words = compact.expand_tiles(payload, math.prod(like.shape))
    return core.from_bits(words.reshape(like.shape), like.dtype)
