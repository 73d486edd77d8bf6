"""The codec `ef21`: workers send how their arrays changed."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws, _rounds
from jaxmotion.codecs.combinators import _contributors, _multi_round
from jaxmotion.core import Array, PyTree, ShapedLike


class Ef21(NamedTuple):
  """State of `ef21` for one array.

  Attributes:
    own: float32 of the array's shape, what this worker has sent in all.
    mean: the mean of it over workers, equal on all of them.
    inner: the wrapped codec's state.
  """

  own: Array
  mean: core.Shared
  inner: PyTree = ()


@dataclasses.dataclass(frozen=True)
class ef21(_multi_round.MultiRoundCodec):
  """Encodes the difference to what was sent before (EF21).

  Worker r sends c_r = encode(x_r - h_r), and h_r grows by decode(c_r). All know
  the mean of h_r, which is the result. What is left out now is left in the next
  difference, so that no error adds up: it takes the place of `feedback`.

  Properties: the mean is that of h_r, exactly but for float32 rounding. While
  the arrays stay the same, h_r approaches x_r by the codec's contraction. With
  `identity` it is the mean itself. It starts from zero. An element that is not
  finite reaches the result, but not the state.

  Payloads are gathered, or summed if they may be, so bytes grow with the
  workers. A second encoding of their mean would not be what workers remember.

  Args:
    codec: encodes differences, such as `topk(density=0.01)`; one that bounds
      the memory of `feedback`.

  Example:
    >>> from jaxmotion.codecs import topk
    >>> codec, x = ef21(topk(density=0.5)), jnp.array([1.0, 3.0])
    >>> _, state = codec.encode(x, codec.init(x))
    >>> _, later = codec.encode(x, state)
    >>> state.own.tolist(), later.own.tolist()
    ([0.0, 3.0], [1.0, 3.0])

  References:
    Richtarik, Sokolov and Fatkhullin, *EF21: A New, Simpler, Theoretically
    Better, and Practically Faster Error Feedback*, 2021.
  """

  codec: _codec.Codec

  def __post_init__(self) -> None:
    _codec.check_codec("codec", self.codec)
    if not self.codec.laws.bounds_memory:
      raise ValueError(
        "`codec` must bound the error memory (`codec.laws.bounds_memory`), got "
        f"{self.codec!r}: its error may be greater than the difference."
      )
    if isinstance(self.codec, _contributors.contributors):
      raise ValueError(
        "`codec` must send parts of the mean over all workers, got "
        f"{self.codec!r}."
      )

  @property
  def needs_key(self) -> bool:
    """Whether the wrapped codec needs a key."""
    return self.codec.needs_key

  @property
  def laws(self) -> _laws.Laws:
    """The wrapped codec's law of elements that are not finite."""
    return _laws.Laws(nonfinite=self.codec.laws.nonfinite)

  @property
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of its messages: one sum or gather, or the codec's own."""
    if self.codec.round_kinds:
      return self.codec.round_kinds
    return ("sum",) if self.codec.summable else ("gather",)

  def init(self, like: ShapedLike) -> Ef21:
    """Returns zeros, and the wrapped codec's state."""
    _codec.check_shaped("like", like)
    own, mean = (jnp.zeros(like.shape, jnp.float32) for _ in range(2))
    return Ef21(own, core.Shared(mean), self.codec.init(like))

  def reduce_in_rounds(
    self, x: Array, state: Ef21, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[_rounds.Reduced]:
    """Reduces the differences with the wrapped codec."""
    self._check_input(x, key)
    self._check_state(state, x)
    change = x.astype(jnp.float32) - state.own
    moved, sent, inner = yield from self._reduce(
      change, state.inner, key, workers
    )
    mean = state.mean.value + moved
    # All workers leave out the same elements: the mean stays that of `own`.
    usable = jnp.isfinite(mean)
    own = state.own + self.codec.decode(sent, change)
    own = jnp.where(usable & jnp.isfinite(own), own, state.own)
    kept = core.Shared(jnp.where(usable, mean, state.mean.value))
    return _rounds.Reduced(mean, sent, Ef21(own, kept, inner))

  def _reduce(
    self, x: Array, state: PyTree, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[tuple[Array, PyTree, PyTree]]:
    """Returns the mean of what is sent, this worker's part, and the state."""
    if self.codec.round_kinds:
      return (yield from self.codec.reduce_in_rounds(x, state, key, workers))
    payload, state = self.codec.encode(x, state, key)
    if self.codec.summable:
      total = yield _rounds.Message("sum", payload)
      return self.codec.decode(total, x) / workers, payload, state
    payloads = yield _rounds.Message("gather", payload)
    return self.codec.sum_decoded(payloads, x) / workers, payload, state

  @property
  def memory_parts(self) -> tuple[_codec.MemoryPart, ...]:
    """The memory of what was sent, and what the wrapped codec remembers."""
    return _codec.nest_parts(_codec.SENT, self.codec.memory_parts)

  def read_memory(self, state: PyTree, like: ShapedLike) -> dict[str, Array]:
    """Returns what this worker has sent, and the wrapped codec's parts."""
    _codec.check_shaped("like", like)
    self._check_state(state, like)
    return {"sent": state.own, **self.codec.read_memory(state.inner, like)}

  def write_memory(
    self,
    parts: Mapping[str, Array],
    means: Mapping[str, Array],
    like: ShapedLike,
    workers: int,
  ) -> Ef21:
    """Returns a state in which all workers know the mean of what was sent."""
    _codec.check_parts(self, parts, means, like, workers)
    own, mean = (a["sent"].astype(jnp.float32) for a in (parts, means))
    inner = self.codec.write_memory(parts, means, like, workers)
    return Ef21(own, core.Shared(mean), inner)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Decodes what a worker sent of its difference."""
    return self.codec.decode(payload, like)

  def _check_state(self, state: Any, x: ShapedLike | None = None) -> None:
    if (
      not isinstance(state, Ef21)
      or not isinstance(state.mean, core.Shared)
      or (x is not None and jnp.shape(state.own) != x.shape)
    ):
      raise ValueError(
        f"`state` must be what `init` returned for {self!r}, got {state!r}."
      )
