"""The codec `contributors`: the mean over workers that sent an element."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmotion import core, kernels
from jaxmotion.codecs import _codec, _laws
from jaxmotion.codecs.combinators import _selection
from jaxmotion.core import Array, PyTree, ShapedLike


@dataclasses.dataclass(frozen=True)
class contributors(_codec.Codec):
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

  codec: _codec.Codec

  def __post_init__(self) -> None:
    _codec.check_codec("codec", self.codec, stateless=True, one_round=True)
    if not _selection.selects_elements(self.codec):
      raise ValueError(
        "`codec` must select elements as they are (`topk`, `threshold`, "
        "`random_k(scaled=False)`, or a chain that begins with one), got "
        f"{self.codec!r}."
      )

  @property
  def needs_key(self) -> bool:
    """Whether the wrapped codec needs a key."""
    return self.codec.needs_key

  @property
  def laws(self) -> _laws.Laws:
    """The laws of the wrapped codec."""
    return self.codec.laws

  def _count_dropped(self, payload: PyTree, like: ShapedLike) -> Array:
    return self.codec._count_dropped(payload, like)

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Encodes an array with the wrapped codec."""
    self._check_input(x, key, state)
    return self.codec.encode(x, state, key)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes a payload with the wrapped codec."""
    return self.codec.decode(payload, like)

  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Returns the mean over senders, times the number of workers."""
    self._check_payload(payloads, like, stacked=True)
    total = self.codec.sum_decoded(payloads, like)
    wide = jax.ShapeDtypeStruct(like.shape, total.dtype)

    def mark(payload: PyTree, like: ShapedLike) -> Array:
      return _selection.mark_sent(self.codec, payload, like)

    count = kernels.sum_decoded(mark, payloads, wide)
    workers = jax.tree.leaves(payloads)[0].shape[0]
    return jnp.where(count > 0, total * workers / jnp.maximum(count, 1), 0.0)
