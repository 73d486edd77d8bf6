"""Codecs of levels that fit the array, or the distribution of its elements."""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import core, kernels
from jaxmotion.codecs import _bases, _laws
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import pack

# Up to so many levels are reductions of their own; more, a scatter of sums.
_MAX_REDUCE = 16
_ITERATIONS = 3000


class Codes(NamedTuple):
  """Payload of packed codes and the levels that they stand for."""

  words: Array  # uint32[rows, columns], codes of the elements, flat and packed.
  levels: Array  # float32[2^bits], added to `mean`.
  mean: Array  # float32[], the mean of the array.


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(bits=core.integer(2, 8), span=core.number(0, 1e6, open_low=True))
class codebook(_bases.ArrayCodec):
  """Rounds elements to levels that are means of elements (SparseLoCo).

  With m the mean, s the standard deviation and n = 2^bits: the elements fall
  into n bins of width w = span * s / n. The bin of x is
  clip(round((x - m) / w + n / 2), 0, n - 1). The level of a bin is the mean of
  the elements in it. There is one table for the whole array. It suits the
  elements that `topk` selects.

  Properties: never further from x than the mean of x is,
  ||decode(encode(x)) - x||^2 = sum (x - m)^2 - sum of level^2; biased. A
  non-finite element makes the array decode to NaN. The standard deviation
  divides by n - 1, but for two elements, of which one would be lost.

  Args:
    bits: width of a code, 2 to 8.
    span: width of all bins together, in standard deviations.

  Example:
    >>> x = jnp.array([1.0, 1.2, -1.0, -1.2])
    >>> payload, _ = codebook(bits=2).encode(x)
    >>> [round(float(y), 4) for y in codebook(bits=2).decode(payload, x)]
    [1.1, 1.1, -1.1, -1.1]

  References:
    Sarfi et al., *Communication Efficient LLM Pre-training with SparseLoCo*,
    arXiv 2508.15706, 2025. Code: tplr-ai/CCLoco, commit c01a785.
  """

  bits: int = 2
  span: float = 6.0

  def _make_laws(self) -> _laws.Laws:
    """States the laws of bins, whose width decides about error memory."""
    # Some element is a root mean square from the mean, sqrt(2 / 3) s of three.
    spreads = self.span / 2 ** (self.bits + 1) < 0.8
    most = _laws.MAX_FLOAT32
    return _laws.Laws(
      bounds_memory=spreads,
      # Squares and sums stay finite.
      largest=most**0.5 / 1024,
      nonfinite="array",
    )

  def _encode(self, x: Array, key: core.Key | None) -> Codes:
    """Rounds to bins of equal width, whose levels are the means inside."""
    flat, bins = x.reshape(-1).astype(jnp.float32), 1 << self.bits
    mean = jnp.sum(flat) / max(1, flat.size)
    centered = flat - mean
    divisor = flat.size - 1 if flat.size > 2 else max(1, flat.size)
    spread = jnp.sqrt(jnp.sum(centered * centered)) / math.sqrt(divisor)
    width = self.span * spread / bins
    width = jnp.where((width > 0) & jnp.isfinite(width), width, 1.0)
    code = jnp.round(centered / width + bins // 2)
    # An integer of NaN is undefined; the mean carries it.
    code = jnp.where(jnp.isnan(code), 0, code)
    codes = jnp.clip(code, 0, bins - 1).astype(jnp.uint32)
    levels = _bin_means(centered, codes, bins)
    return Codes(pack.pack_flat(codes, self.bits), levels, mean)

  def _decode(self, payload: Codes, like: ShapedLike) -> Array:
    """Returns the levels that the codes stand for."""
    size = math.prod(like.shape)
    codes = pack.unpack_flat(payload.words, self.bits, size)
    flat = payload.levels[codes] + payload.mean
    return core.saturate_cast(flat.reshape(like.shape), like.dtype)


def _bin_means(x: Array, codes: Array, bins: int) -> Array:
  """Returns the mean of the elements of each bin, 0 for an empty one."""
  if bins <= _MAX_REDUCE:
    bin = jnp.arange(bins, dtype=jnp.uint32)[:, None]
    inside = codes[None] == bin
    counts = inside.sum(1, dtype=jnp.float32)
    totals = jnp.where(inside, x[None], 0.0).sum(1)
  else:
    counts = jax.ops.segment_sum(jnp.ones_like(x), codes, bins)
    totals = jax.ops.segment_sum(x, codes, bins)
  return jnp.where(counts > 0, totals / jnp.maximum(counts, 1), 0.0)


class Leveled(NamedTuple):
  """Payload of packed codes and the scales of their blocks."""

  words: Array  # uint32[rows, columns], codes of the elements, flat and packed.
  scale: Array  # float32[blocks], in units of which the levels are.


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(bits=core.integer(1, 4), block=kernels.check_block)
class lloyd_max(_bases.ArrayCodec):
  """Rounds elements to the levels that suit a normal distribution best.

  The levels are those of Lloyd and Max, which have the least mean square error
  for normally distributed elements: +-0.4528 and +-1.5104 for 2 bits. With c
  the level next to x over the root mean square of the block, encode(x) =
  (c, sum(x c) / sum(c c)); decode multiplies. Put `rotate` before it: what is
  rotated is nearly normal, whatever it was.

  Properties: a contraction, as the scale is the best one for the codes. Biased:
  use it with `feedback`. On normally distributed blocks of 128 elements the
  relative error is 0.34 with 2 bits, 0.18 with 3 and 0.10 with 4. That of
  `uniform` is 0.77, 0.27 and 0.12. A non-finite element makes its whole block
  decode to NaN.

  Args:
    bits: width of a code, 1 to 4. One bit is `sign`, which is faster.
    block: number of elements under one scale, a contiguous run.

  Example:
    >>> x = jnp.array([-1.5, -0.5, 0.5, 1.5])
    >>> payload, _ = lloyd_max(bits=2).encode(x)
    >>> [round(float(y), 2) for y in lloyd_max(bits=2).decode(payload, x)]
    [-1.51, -0.45, 0.45, 1.51]

  References:
    Lloyd, *Least Squares Quantization in PCM*, 1982. Max, *Quantizing for
    Minimum Distortion*, 1960. Vargaftik et al., *EDEN: Communication-Efficient
    and Robust Distributed Mean Estimation for Federated Learning*, 2022 (after
    a rotation).
  """

  bits: int = 2
  block: int = 128

  def _make_laws(self) -> _laws.Laws:
    """States the laws of levels that a normal distribution suits."""
    levels = _normal_levels(self.bits)
    spread = float(levels[-1] / levels[levels.size // 2])
    return _laws.Laws(
      # Codes c keep (x c)^2 / ||c||^2 of the energy of a block. All have the
      # sign of their element, and differ by the factor `spread` at most.
      contraction=0.98 / spread**2 / self.block,
      bounds_memory=True,
      error=_laws.ErrorBound(
        peak=(1 + spread) * (1 + 2.0**-12), floor=2.0**-120
      ),
      largest=_laws.MAX_FLOAT32 / (2 * spread),
      nonfinite="block",
    )

  def _encode(self, x: Array, key: core.Key | None) -> Leveled:
    """Rounds to the levels of N(0, 1) in units of each block's spread."""
    # The scale of a block is the one of least square error for its codes.
    width = self._block_width(x)
    blocks = -(-x.size // width)
    flat = jnp.pad(
      x.reshape(-1).astype(jnp.float32), (0, blocks * width - x.size)
    )
    rows = flat.reshape(blocks, width)
    # In units of the greatest element, whose square may leave float32.
    peak = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    rows = rows / jnp.where(peak > 0, peak, 1.0)
    inside = np.arange(blocks * width).reshape(blocks, width) < x.size
    counts = np.maximum(inside.sum(1, keepdims=True), 1).astype(np.float32)
    rms = jnp.sqrt(jnp.sum(rows * rows, axis=1, keepdims=True) / counts)
    levels = _normal_levels(self.bits)
    codes = jnp.zeros(rows.shape, jnp.uint32)
    for low, high in itertools.pairwise(levels):
      threshold = jnp.float32((low + high) / 2)
      codes = codes + (rows > threshold * rms).astype(jnp.uint32)
    values = jnp.where(inside, _take_levels(codes, self.bits), 0.0)
    scale = jnp.sum(rows * values, axis=1) / jnp.maximum(
      jnp.sum(values * values, axis=1), jnp.float32(levels[-1] ** 2 / 256)
    )
    return Leveled(pack.pack_flat(codes, self.bits), scale * peak[:, 0])

  def _decode(self, payload: Leveled, like: ShapedLike) -> Array:
    """Returns the levels of the codes under their scales."""
    size, width = math.prod(like.shape), self._block_width(like)
    blocks = payload.scale.shape[0]
    codes = pack.unpack_flat(payload.words, self.bits, blocks * width)
    values = _take_levels(codes.reshape(blocks, width), self.bits)
    flat = (values * payload.scale[:, None]).reshape(-1)[:size]
    return core.saturate_cast(flat.reshape(like.shape), like.dtype)

  def _block_width(self, like: ShapedLike) -> int:
    return max(1, min(math.prod(like.shape), self.block))


def _take_levels(codes: Array, bits: int) -> Array:
  """Returns the levels of codes, by comparisons, which fuse with what reads."""
  levels = _normal_levels(bits)
  values = jnp.full(codes.shape, jnp.float32(levels[0]))
  for code, level in enumerate(levels[1:], 1):
    values = jnp.where(codes == code, jnp.float32(level), values)
  return values


@functools.lru_cache(maxsize=8)
def _normal_levels(bits: int) -> np.ndarray:
  """Returns the levels of least mean square error of N(0, 1), rising.

  >>> np.round(_normal_levels(2), 4).tolist()
  [-1.5104, -0.4528, 0.4528, 1.5104]
  """
  count = 1 << bits
  levels = np.linspace(-2, 2, count) if bits > 1 else np.array([-1.0, 1.0])
  for _ in range(_ITERATIONS):
    # A level is the mean of the distribution between the midpoints.
    edges = np.concatenate(
      [[-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]]
    )
    density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([math.erf(edge / math.sqrt(2)) for edge in edges]) / 2
    levels = -np.diff(density) / np.diff(below)
  return (levels - levels[::-1]) / 2  # Symmetric to the last bit.
