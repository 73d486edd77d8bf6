"""Rounds of communication: what a reduction sends, and what comes back.

A reduction over workers is written as a generator. It yields a `Message` for
each round, gets the reply, and returns its result. The code that runs it
decides how a message travels. In a program that is a collective, in a count of
bytes a stand-in reply, and in a test a list.
"""

from collections.abc import Generator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxmotion.core import Array, PyTree

Result = TypeVar("Result")
Rounds = Generator["Message", PyTree, Result]


class Message(NamedTuple):
  """Payload that a worker sends in one round, and how it travels.

  Attributes:
    kind: "sum" or "max" of the payloads, element by element (unsigned words of
      a sum are equal on all workers and are not sent). "gather": the reply has
      a leading axis of workers. "all_to_all": row r goes to worker r, and row r
      of the reply came from worker r. All replies but that of "all_to_all" are
      the same on every worker.
    payload: pytree of arrays.

  Example:
    >>> Message("max", jnp.float32(3.0)).kind
    'max'
  """

  kind: str
  payload: PyTree


class Reduced(NamedTuple):
  """Result of the rounds of a codec.

  Attributes:
    mean: the mean over workers, the same bits on all of them.
    sent: this worker's own part of the mean, as a payload for `decode`.
    state: the new state.

  Example:
    >>> from jaxmotion import codecs
    >>> x = jnp.array([3.0, 4.0])
    >>> def mean_by_sum(x, workers):  # A reduction of one round.
    ...   total = yield codecs.Message("sum", x)
    ...   return Reduced(mean=total / workers, sent=x, state=())
    >>> rounds = mean_by_sum(x, workers=2)
    >>> message = next(rounds)
    >>> try:
    ...   rounds.send(message.payload + 1)  # What the other worker adds.
    ... except StopIteration as end:
    ...   end.value.mean.tolist()
    [2.0, 2.5]
  """

  mean: Array
  sent: PyTree
  state: PyTree


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
