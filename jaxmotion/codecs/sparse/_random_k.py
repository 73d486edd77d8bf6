"""The codec `random_k`: elements at random positions, equal on all workers."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import select


class Sampled(NamedTuple):
  """Payload of sampled elements and the seed of their positions.

  Attributes:
    values: float32[k], in order of position.
    seed: uint32[], equal on all workers.
  """

  values: Array
  seed: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class random_k(_codec.Codec):
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

  summable: ClassVar[bool] = True

  density: float
  scaled: bool = True

  def __post_init__(self) -> None:
    core.check_number("density", self.density, 0, 1, open_low=True)
    core.check_choice("scaled", self.scaled, (True, False))

  @property
  def needs_key(self) -> bool:
    """Whether positions are drawn: always."""
    return True

  @property
  def laws(self) -> _laws.Laws:
    """The laws of an unbiased codec if scaled, of a projection if not."""
    # Most elements of a run of which one is drawn.
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
        relative=0.0 if is_whole else max(1.0, scale - 1.0), floor=2.0**-126
      ),
      largest=float(jnp.finfo(jnp.float32).max) / scale,
      nonfinite="element" if is_whole else "lost",
    )

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[Sampled, PyTree]:
    """Returns k elements and the seed of their positions, and the state."""
    self._check_input(x, key, state)
    assert key is not None
    k = self._sample_size(x)
    flat = jnp.ravel(x).astype(jnp.float32)
    positions = select.draw_stratified(key.shared, x.size, k)
    values = flat.at[positions].get(mode="promise_in_bounds")
    if self.scaled and k < x.size:
      values = values * select.stratum_sizes(x.size, k).astype(jnp.float32)
    return Sampled(values, key.shared), state

  def decode(self, payload: Sampled, like: ShapedLike) -> Array:
    """Returns zeros with the elements where they stood."""
    self._check_payload(payload, like)
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
