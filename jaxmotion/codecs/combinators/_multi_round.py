"""Base of codecs whose payload depends on what other workers sent."""

import abc

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.codecs import _codec, _rounds
from jaxmotion.codecs._rounds import Message, Reduced
from jaxmotion.core import Array, PyTree


class MultiRoundCodec(_codec.Codec):
  """Reduces arrays over workers in rounds of its own.

  A subclass implements `round_kinds`, `reduce_in_rounds` and `decode`, and
  `init` if it has state. State that enters the mean has to be equal on all
  workers: mark it as `jaxmotion.Shared`, and make it from replies alone.

  Law: the mean over workers of `decode(sent)` is `mean`, for a codec that
  states `bounds_memory`. `testing.check_rounds` checks it.

  Such codecs are for `all_reduce` and `exchange`, alone or inside of
  `feedback`, `rules`, `buckets` and, as the last one, `chain`.

  Example:
    >>> class greatest(MultiRoundCodec):  # The workers' greatest elements.
    ...   round_kinds = ("max",)
    ...   def reduce_in_rounds(self, x, state, key, workers):
    ...     reply = yield Message("max", x)
    ...     return Reduced(reply, x, state)
    ...   def decode(self, payload, like):
    ...     return payload
    >>> greatest().encode(jnp.ones(2))[0].tolist()
    [1.0, 1.0]
  """

  @property
  @abc.abstractmethod
  def round_kinds(self) -> tuple[str, ...]:
    """Kinds of the messages, in order: of "sum", "max", "gather", ..."""

  @abc.abstractmethod
  def reduce_in_rounds(
    self, x: Array, state: PyTree, key: core.Key | None, workers: int
  ) -> _rounds.Rounds[Reduced]:
    """Yields what is sent, is sent what came, and returns the mean."""

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Encodes an array as a worker does that has no others."""
    self._check_input(x, key)
    reduced = answer_alone(self.reduce_in_rounds(x, state, key, 1))
    return reduced.sent, reduced.state


def answer_alone(rounds: _rounds.Rounds[_rounds.Result]) -> _rounds.Result:
  """Runs rounds of one worker, who gets back what it sends."""
  try:
    message = next(rounds)
    while True:
      message = rounds.send(stand_in_reply(message, 1))
  except StopIteration as stop:
    return stop.value


def stand_in_reply(message: Message, workers: int) -> PyTree:
  """Returns a reply of the right shapes, as if all workers sent the same.

  Args:
    message: what a worker sends.
    workers: number of workers.
  """
  if message.kind != "gather":
    return message.payload
  return jax.tree.map(
    lambda a: jnp.broadcast_to(a, (workers, *jnp.shape(a))), message.payload
  )
