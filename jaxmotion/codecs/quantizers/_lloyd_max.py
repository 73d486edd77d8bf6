"""The codec `lloyd_max`: the best levels for normally distributed elements."""

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmotion import core, kernels
from jaxmotion.codecs import _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import pack

_ITERATIONS = 3000


class Leveled(NamedTuple):
  """Payload of packed codes and the scales of their blocks.

  Attributes:
    words: uint32[rows, columns], codes of the elements, flat and packed.
    scale: float32[blocks], in units of which the levels are.
  """

  words: Array
  scale: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class lloyd_max(_codec.Codec):
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

  def __post_init__(self) -> None:
    core.check_int("bits", self.bits, 1, 4)
    kernels.check_block(self.block)

  @property
  def laws(self) -> _laws.Laws:
    """The laws of a projection onto the codes of a block."""
    levels = _normal_levels(self.bits)
    spread = float(levels[-1] / levels[levels.size // 2])
    return _laws.Laws(
      # ||x||^2 loses (x c)^2 / ||c||^2 of every block.
      contraction=0.98 / spread**2 / self.block,
      bounds_memory=True,
      error=_laws.ErrorBound(
        peak=(1 + spread) * (1 + 2.0**-12), floor=2.0**-120
      ),
      largest=float(jnp.finfo(jnp.float32).max) / (2 * spread),
      nonfinite="block",
    )

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[Leveled, PyTree]:
    """Returns codes and one scale per block, and the state."""
    self._check_input(x, key, state)
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
    return Leveled(pack.pack_flat(codes, self.bits), scale * peak[:, 0]), state

  def decode(self, payload: Leveled, like: ShapedLike) -> Array:
    """Returns the levels of the codes under their scales."""
    self._check_payload(payload, like)
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
