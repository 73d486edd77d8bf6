"""The codec `momentum_correction`: momentum before selection (DGC)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _codec, _division, _laws
from jaxmotion.codecs.combinators import _selection
from jaxmotion.core import Array, PyTree, ShapedLike


class MomentumCorrection(NamedTuple):
  """State of `momentum_correction` for one array.

  Attributes:
    momentum: float32 of the array's shape, this worker's own.
    inner: the wrapped codec's state.
  """

  momentum: Array
  inner: PyTree


@dataclasses.dataclass(frozen=True)
class momentum_correction(_codec.Codec):
  """Sends each worker's momentum in place of its gradient.

  m = decay m + x, and the wrapped codec encodes m (with `nesterov`,
  m = decay (m + x), and it encodes m + x). What a selection in `feedback` sends
  late then has the momentum of all steps that it waited for. With `masking` the
  momentum restarts from zero at elements that were sent. The optimizer after
  the exchange has no momentum of its own.

  Properties: without masking, and with a codec that loses nothing, the mean is
  that of a momentum after the exchange. State that is not finite is forgotten.

  Args:
    codec: encodes the momentum, such as `feedback(topk(density=0.001))`.
    decay: factor on the momentum, in [0, 1).
    nesterov: whether the gradient is added once more.
    masking: whether elements that were sent lose their momentum; for codecs
      that select elements.

  Example:
    >>> from jaxmotion.codecs import feedback, topk
    >>> codec = momentum_correction(feedback(topk(density=0.5)), decay=0.5)
    >>> x = jnp.array([1.0, 3.0])
    >>> payload, state = codec.encode(x, codec.init(x))
    >>> state.momentum.tolist(), codec.codec.error(state.inner).tolist()
    ([1.0, 0.0], [1.0, 0.0])

  References:
    Lin et al., *Deep Gradient Compression: Reducing the Communication Bandwidth
    for Distributed Training*, 2018, algorithm 1.
  """

  codec: _codec.Codec
  decay: float = dataclasses.field(default=0.9, kw_only=True)
  nesterov: bool = dataclasses.field(default=False, kw_only=True)
  masking: bool = dataclasses.field(default=True, kw_only=True)

  def __post_init__(self) -> None:
    _codec.check_codec("codec", self.codec, one_round=True)
    core.check_number("decay", self.decay, 0, 1, open_high=True)
    core.check_bool("nesterov", self.nesterov)
    core.check_bool("masking", self.masking)
    if self.masking and not _selection.selects_elements(self.codec):
      raise ValueError(
        "`codec` must select elements for `masking` (`topk`, `topk_columns`, "
        "`threshold`, `random_k(scaled=False)`, in `feedback` or first in a "
        f"chain), got {self.codec!r}: give it masking=False."
      )

  @property
  def summable(self) -> bool:  # type: ignore[override]
    """Whether the wrapped codec is summable."""
    return self.codec.summable

  @property
  def needs_key(self) -> bool:
    """Whether the wrapped codec needs a key."""
    return self.codec.needs_key

  @property
  def laws(self) -> _laws.Laws:
    """The wrapped codec's law of elements that are not finite."""
    return _laws.Laws(nonfinite=self.codec.laws.nonfinite)

  def init(self, like: ShapedLike) -> MomentumCorrection:
    """Returns zero momentum and the wrapped codec's state."""
    _codec.check_shaped("like", like)
    zeros = jnp.zeros(like.shape, jnp.float32)
    return MomentumCorrection(zeros, self.codec.init(like))

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, MomentumCorrection]:
    """Encodes the momentum with the wrapped codec."""
    self._check_input(x, key)
    self._check_state(state, x)
    own = x.astype(jnp.float32)
    if self.nesterov:
      momentum = self.decay * (state.momentum + own)
      value = momentum + own
    else:
      momentum = value = self.decay * state.momentum + own
    payload, inner = self.codec.encode(value, state.inner, key)
    momentum = kernels.clear_error(momentum)
    if self.masking:
      momentum = jnp.where(
        _selection.mark_sent(self.codec, payload, momentum) > 0, 0.0, momentum
      )
    return payload, MomentumCorrection(momentum, inner)

  def encode_mean(
    self,
    payloads: PyTree,
    like: ShapedLike,
    state: PyTree = (),
    key: core.Key | None = None,
  ) -> tuple[PyTree, MomentumCorrection]:
    """Encodes the mean of momenta, which gets no momentum once more."""
    self._check_payload(payloads, like, stacked=True)
    self._check_state(state)
    payload, inner = self.codec.encode_mean(payloads, like, state.inner, key)
    return payload, state._replace(inner=inner)

  def division(
    self, like: ShapedLike, workers: int
  ) -> _division.Division | None:
    """Returns the wrapped codec's division of a float32 array."""
    super().division(like, workers)
    wide = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    return self.codec.division(wide, workers)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes a payload with the wrapped codec."""
    return self.codec.decode(payload, like)

  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Decodes and adds several workers' payloads with the wrapped codec."""
    self._check_payload(payloads, like, stacked=True)
    return self.codec.sum_decoded(payloads, like)

  def after_reduce(
    self, state: MomentumCorrection, output: Array
  ) -> MomentumCorrection:
    """Updates the wrapped codec's state."""
    self._check_state(state)
    return state._replace(inner=self.codec.after_reduce(state.inner, output))

  def canonical_state(self, state: MomentumCorrection) -> MomentumCorrection:
    """Returns the momentum, and the wrapped codec's canonical state."""
    self._check_state(state)
    return state._replace(inner=self.codec.canonical_state(state.inner))

  @property
  def needs_mean(self) -> bool:
    """Whether the wrapped codec needs the mean."""
    return self.codec.needs_mean

  @property
  def memory_parts(self) -> tuple[_codec.MemoryPart, ...]:
    """The momentum, and what the wrapped codec remembers."""
    return _codec.nest_parts(_codec.MOMENTUM, self.codec.memory_parts)

  def read_memory(
    self, state: MomentumCorrection, like: ShapedLike
  ) -> dict[str, Array]:
    """Returns this worker's momentum, and the wrapped codec's parts."""
    _codec.check_shaped("like", like)
    self._check_state(state, like)
    inner = self.codec.read_memory(state.inner, like)
    return {"momentum": state.momentum, **inner}

  def write_memory(
    self,
    parts: Mapping[str, Array],
    means: Mapping[str, Array],
    like: ShapedLike,
    workers: int,
  ) -> MomentumCorrection:
    """Returns a state that goes on from this momentum."""
    _codec.check_parts(self, parts, means, like, workers)
    inner = self.codec.write_memory(parts, means, like, workers)
    return MomentumCorrection(parts["momentum"].astype(jnp.float32), inner)

  def _count_dropped(self, payload: PyTree, like: ShapedLike) -> Array:
    return self.codec._count_dropped(payload, like)

  def _check_sharding(self, x: Any) -> None:
    """Raises if the wrapped codec cannot encode a sharded array."""
    self.codec._check_sharding(x)

  def _check_state(self, state: Any, x: ShapedLike | None = None) -> None:
    if not isinstance(state, MomentumCorrection) or (
      x is not None and jnp.shape(state.momentum) != x.shape
    ):
      raise ValueError(
        f"`state` must be what `init` returned for {self!r}, got {state!r}."
      )
