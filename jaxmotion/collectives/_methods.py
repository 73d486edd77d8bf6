"""Methods of the all-reduce of one array, each as rounds of communication.

* "sum": summable payloads are added by the network; nothing is decoded before.
* "gather": every worker gets every payload, decodes all and adds them up. One
  encoding, (N - 1) payloads received by each of N workers.
* "two_phase": a reduce-scatter and an all-gather. Worker r gets the payloads of
  shard r, adds them up, and encodes the mean of the shard for all. Two
  encodings, but bytes that do not grow with the workers.
* "rounds": the codec itself says what it sends, round by round.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion.codecs import Codec, Message, Rounds
from jaxmotion.codecs.extend import check_codec, stand_in_reply
from jaxmotion.collectives._arguments import check_shaped
from jaxmotion.collectives._layout import row_like
from jaxmotion.collectives._rows import encode_rows, join_rows, pad_to_rows
from jaxmotion.collectives._state import init_rows
from jaxmotion.core import (
  Array,
  Key,
  PyTree,
  ShapedLike,
  check_choice,
  check_int,
  make_key,
)

_KINDS = {
  "sum": ("sum",),
  "gather": ("gather",),
  "two_phase": ("all_to_all", "gather"),
}


class ReduceState(NamedTuple):
  """Codec state of the reduction of one array.

  Attributes:
    first: state of the first encoding, of this worker's own elements: for
      "two_phase" one state for each shard, stacked; otherwise one state.
    second: state of the second encoding, of the shard's mean; `()` unless the
      method is "two_phase".
  """

  first: PyTree
  second: PyTree


class Reduction(NamedTuple):
  """One array to reduce.

  Attributes:
    codec: encodes the array.
    x: the array, in the dtype that it is encoded in.
    state: this worker's state.
    key: randomness, or None.
    workers: number of workers.
    op: "mean" or "sum" over workers.
  """

  codec: Codec
  x: Array
  state: ReduceState
  key: Key | None
  workers: int
  op: str


ReductionRounds = Rounds[tuple[Array, ReduceState]]


def round_kinds(codec: Codec, method: str) -> tuple[str, ...]:
  """Returns the kinds of messages that a method sends, in order.

  Args:
    codec: encodes the array.
    method: "sum", "gather", "two_phase" or "rounds".

  Example:
    >>> from jaxmotion import codecs
    >>> round_kinds(codecs.sign(), "two_phase")
    ('all_to_all', 'gather')
  """
  return codec.round_kinds if method == "rounds" else _KINDS[method]


def plan_messages(
  codec: Codec, like: ShapedLike, method: str, workers: int
) -> list[Message]:
  """Returns the messages that one worker sends to reduce an array.

  Nothing is computed. A codec's own rounds are traced with stand-in replies.

  Args:
    codec: encodes the array.
    like: shape and dtype of the array.
    method: "sum", "gather", "two_phase" or "rounds".
    workers: number of workers.

  Returns:
    One message for each round, whose payload has shapes in place of arrays.

  Example:
    >>> from jaxmotion import codecs
    >>> like = jax.ShapeDtypeStruct((64, 32), "float32")
    >>> [m.kind for m in plan_messages(codecs.sign(), like, "two_phase", 4)]
    ['all_to_all', 'gather']
  """
  check_codec("codec", codec)
  check_shaped("like", like)
  check_choice("method", method, (*_KINDS, "rounds"))
  check_int("workers", workers, 1)
  if method == "rounds" and not codec.round_kinds:
    raise ValueError(
      f"`method` must be one of {tuple(_KINDS)} for a codec without rounds, "
      f"got 'rounds' for {codec!r}."
    )
  if method == "rounds":
    dtype = jnp.dtype(like.dtype).name
    return list(_trace_rounds(codec, tuple(like.shape), dtype, workers))
  if method != "two_phase":
    return [Message(method, codec.payload_like(like))]
  row = codec.payload_like(row_like(like, workers))
  rows = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((workers, *a.shape), a.dtype), row
  )
  return [Message("all_to_all", rows), Message("gather", row)]


@functools.lru_cache(maxsize=1024)
def _trace_rounds(
  codec: Codec, shape: tuple[int, ...], dtype: str, workers: int
) -> tuple[Message, ...]:
  """Runs a codec's rounds on shapes, with stand-in replies."""

  def send_all(x: Array, state: PyTree) -> list[PyTree]:
    rounds = codec.reduce_in_rounds(x, state, make_key(0), workers)
    reply, payloads = None, []
    for _ in codec.round_kinds:
      message = rounds.send(reply)
      payloads.append(message.payload)
      reply = stand_in_reply(message, workers)
    rounds.close()  # What follows the last message sends nothing.
    return payloads

  x = jax.ShapeDtypeStruct(shape, dtype)
  state = jax.eval_shape(lambda: codec.init_rounds(x, workers))
  payloads = jax.eval_shape(send_all, x, state)
  return tuple(map(Message, codec.round_kinds, payloads))


def init_state(
  codec: Codec, like: ShapedLike, method: str, workers: int
) -> ReduceState:
  """Returns the fresh state of an array that is reduced by a method."""
  if method == "rounds":
    return ReduceState(codec.init_rounds(like, workers), ())
  if method != "two_phase":
    return ReduceState(codec.init(like), ())
  row = row_like(like, workers)
  return ReduceState(init_rows(codec, workers, row), codec.init(row))


def reduce_array(reduction: Reduction, method: str) -> ReductionRounds:
  """Reduces an array by a method; returns the result and the new state."""
  return _METHODS[method](reduction)


def _reduce_by_sum(r: Reduction) -> ReductionRounds:
  payload, state = r.codec.encode(r.x, r.state.first, r.key)
  total = yield Message("sum", payload)
  return _finish_one_phase(r, r.codec.decode(total, r.x), state)


def _reduce_by_gather(r: Reduction) -> ReductionRounds:
  payload, state = r.codec.encode(r.x, r.state.first, r.key)
  payloads = yield Message("gather", payload)
  return _finish_one_phase(r, r.codec.sum_decoded(payloads, r.x), state)


def _finish_one_phase(
  r: Reduction, total: Array, state: PyTree
) -> tuple[Array, ReduceState]:
  """Returns the mean or sum, and the state updated with the mean."""
  mean = total / r.workers
  state = ReduceState(r.codec.after_reduce(state, mean), ())
  return (mean if r.op == "mean" else total), state


def _reduce_in_two_phases(r: Reduction) -> ReductionRounds:
  """Reduces shard r on worker r, then gathers the encoded means of all shards.

  Every shard is encoded by itself, with its own state and key. The key of the
  mean's encoding is folded with `workers`, which is no shard's index, so both
  encodings round independently.
  """
  codec, row = r.codec, row_like(r.x, r.workers)
  payload, first = encode_rows(
    codec, pad_to_rows(r.x, r.workers), r.state.first, r.key
  )
  received = yield Message("all_to_all", payload)
  key = None if r.key is None else r.key.fold(r.workers)
  payload, second = codec.encode_mean(received, row, r.state.second, key)
  second = codec.after_reduce(second, codec.decode(payload, row))
  payloads = yield Message("gather", payload)
  rows = jax.vmap(lambda p: codec.decode(p, row))(payloads)
  first = jax.vmap(codec.after_reduce)(first, rows)
  y = join_rows(rows, r.x)
  if r.op == "sum":
    y = y.astype(jnp.promote_types(y.dtype, jnp.float32)) * r.workers
  return y, ReduceState(first, second)


def _reduce_by_codec(r: Reduction) -> ReductionRounds:
  reduced = yield from r.codec.reduce_in_rounds(
    r.x, r.state.first, r.key, r.workers
  )
  mean = reduced.mean
  state = ReduceState(r.codec.after_reduce(reduced.state, mean), ())
  return (mean if r.op == "mean" else mean * r.workers), state


_METHODS = {
  "sum": _reduce_by_sum,
  "gather": _reduce_by_gather,
  "two_phase": _reduce_in_two_phases,
  "rounds": _reduce_by_codec,
}
