"""Codecs that look at which elements a selection sends."""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _bases, _checks, _codec, _laws
from jaxmotion.codecs._arrays import _linear
from jaxmotion.codecs._combinators import _chain, _feedback
from jaxmotion.core import Array, PyTree, ShapedLike


@dataclasses.dataclass(frozen=True)
@core.declare(
  codec=functools.partial(_codec.check_codec, stateless=True, one_round=True)
)
class contributors(_bases.WrapperCodec):
  """Averages each element over the workers that sent it, not over all.

  Payloads are those of the wrapped sparse codec. Their sum is divided, at each
  element, by the number of workers that sent it instead of by all workers. An
  element that one of N workers sent counts N times as much. Elements that no
  worker sent are zero.

  It is the mean of DeMo and SparseLoCo. A worker of `weight` 0 still takes part
  with the places of its elements.

  Properties: those of the wrapped codec. In `feedback`, local form: what a
  worker did not send is remembered, whatever the mean was.

  Args:
    codec: a selection such as `topk`, or a `chain` that begins with one. In a
      `chain` with `rotate` before, wrap what comes after `rotate`.

  Example:
    >>> from jaxmotion.codecs import topk
    >>> codec, x = contributors(topk(density=0.5)), jnp.zeros(2)
    >>> both = jax.vmap(lambda x: codec.encode(x)[0])(
    ...   jnp.array([[4.0, 1.0], [2.0, 1.0]])
    ... )
    >>> (codec.sum_decoded(both, x) / 2).tolist()
    [3.0, 0.0]

  References:
    Peng et al., *DeMo: Decoupled Momentum Optimization*, 2024; Sarfi et al.,
    *Communication Efficient LLM Pre-training with SparseLoCo*, 2025.
  """

  def __post_init__(self) -> None:
    if not selects_elements(self.codec):
      raise ValueError(
        "`codec` must select elements as they are (`topk`, `threshold`, "
        "`random_k(scaled=False)`, or a chain that begins with one), got "
        f"{self.codec!r}."
      )

  @property
  def laws(self) -> _laws.Laws:
    """The laws of the wrapped codec."""
    return self.codec.laws

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Encodes an array with the wrapped codec."""
    return self.codec.encode(x, state, key)

  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Returns the mean over senders, times the number of workers."""
    total = self.codec.sum_decoded(payloads, like)
    wide = jax.ShapeDtypeStruct(like.shape, total.dtype)
    workers = jax.tree.leaves(payloads)[0].shape[0]
    count = mark_sent(self.codec, payloads, wide)
    return jnp.where(count > 0, total * workers / jnp.maximum(count, 1), 0.0)


class MomentumCorrection(NamedTuple):
  """State of `momentum_correction` for one array."""

  momentum: Array  # float32 of the array's shape, this worker's own.
  inner: PyTree = ()  # The wrapped codec's state.


@dataclasses.dataclass(frozen=True)
@core.declare(
  codec=functools.partial(_codec.check_codec, one_round=True),
  decay=core.number(0, 1, open_high=True),
  nesterov=core.boolean,
  masking=core.boolean,
)
class momentum_correction(_bases.MemoryCodec):
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

  _part = _laws.MOMENTUM

  decay: float = dataclasses.field(default=0.9, kw_only=True)
  nesterov: bool = dataclasses.field(default=False, kw_only=True)
  masking: bool = dataclasses.field(default=True, kw_only=True)

  def __post_init__(self) -> None:
    if self.masking and not selects_elements(self.codec):
      raise ValueError(
        "`codec` must select elements for `masking` (`topk`, `topk_columns`, "
        "`threshold`, `random_k(scaled=False)`, in `feedback` or first in a "
        f"chain), got {self.codec!r}: give it masking=False."
      )

  @property
  def summable(self) -> bool:  # type: ignore[override]
    """Whether the wrapped codec is summable."""
    return self.codec.summable

  @core.declare(like=_checks.check_shaped)
  def init(self, like: ShapedLike) -> MomentumCorrection:
    """Returns zero momentum and the wrapped codec's state."""
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
        mark_sent(self.codec, payload, momentum) > 0, 0.0, momentum
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

  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Decodes and adds several workers' payloads with the wrapped codec."""
    return self.codec.sum_decoded(payloads, like)

  def _read_part(self, state: MomentumCorrection) -> Array:
    return state.momentum

  def _write_part(self, own: Array, mean: Array) -> MomentumCorrection:
    return MomentumCorrection(own)

  def _check_state(self, state: Any, like: ShapedLike | None = None) -> None:
    fits = isinstance(state, MomentumCorrection) and (
      like is None or jnp.shape(state.momentum) == like.shape
    )
    _checks.check_state(self, state, fits)


def selects_elements(codec: _codec.Codec) -> bool:
  """Returns whether a codec sends some elements and leaves others out."""
  if isinstance(codec, _feedback.feedback):
    return selects_elements(codec.codec)
  if isinstance(codec, _chain.chain):
    return selects_elements(_without_tiles(codec)[1])
  return codec.laws.projects and not codec.linear


def mark_sent(codec: _codec.Codec, payload: PyTree, like: ShapedLike) -> Array:
  """Returns 1 at the elements that a payload holds, and 0 elsewhere."""
  # Marks of payloads with a leading axis of workers are added. The payload is
  # decoded with ones in place of its values.
  if isinstance(codec, _feedback.feedback):
    return mark_sent(codec.codec, payload, like)
  if isinstance(codec, _chain.chain):
    heads, selection = _without_tiles(codec)
    likes = codec._input_likes(like)[: len(heads) + 1]
    outer, payload = _chain.unnest(payload, len(heads))
    marks = mark_sent(selection, payload, likes[-1])
    return _chain.decode_heads(heads, outer, marks, likes[:-1])
  own = codec.payload_like(like)
  # A codec behind this one may have encoded the values, but not the places.
  places, one = (
    jax.tree.leaves(p._replace(values=()))[0] for p in (payload, own)
  )
  lead = places.shape[: places.ndim - one.ndim]
  ones = jax.tree.map(
    lambda a: jnp.ones((*lead, *a.shape), jnp.float32), own.values
  )
  decode = codec.sum_decoded if lead else codec.decode
  return decode(payload._replace(values=ones), like)


def _without_tiles(
  codec: _chain.chain,
) -> tuple[list[_codec.Codec], _codec.Codec]:
  """Splits a chain into the tilings at its head and the codec after them."""
  is_tiling = lambda inner: isinstance(inner, _linear.tiles)
  heads = list(itertools.takewhile(is_tiling, codec.codecs[:-1]))
  return heads, codec.codecs[len(heads)]
