"""The codec `codebook`: the nearest of few levels that fit the array."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import pack

# Up to so many levels are reductions of their own; more, a scatter of sums.
_MAX_REDUCE = 16


class Codes(NamedTuple):
  """Payload of packed codes and the levels that they stand for.

  Attributes:
    words: uint32[rows, columns], codes of the elements, flat and packed.
    levels: float32[2^bits], added to `mean`.
    mean: float32[], the mean of the array.
  """

  words: Array
  levels: Array
  mean: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class codebook(_codec.Codec):
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

  def __post_init__(self) -> None:
    core.check_int("bits", self.bits, 2, 8)
    core.check_number("span", self.span, 0, 1e6, open_low=True)

  @property
  def laws(self) -> _laws.Laws:
    """The laws of means of elements, of which not all are in one bin."""
    # Some element is a root mean square from the mean, sqrt(2 / 3) s of three.
    spreads = self.span / 2 ** (self.bits + 1) < 0.8
    most = float(jnp.finfo(jnp.float32).max)
    return _laws.Laws(
      bounds_memory=spreads,
      # Squares and sums stay finite.
      largest=most**0.5 / 1024,
      nonfinite="array",
    )

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[Codes, PyTree]:
    """Returns codes and levels, and the state."""
    self._check_input(x, key, state)
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
    return Codes(pack.pack_flat(codes, self.bits), levels, mean), state

  def decode(self, payload: Codes, like: ShapedLike) -> Array:
    """Returns the levels that the codes stand for."""
    self._check_payload(payload, like)
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
