"""Methods of the all-reduce of an array, each as rounds of communication.

* "sum": summable payloads are added by the network; nothing is decoded before.
* "gather": every worker gets every payload, decodes all and adds them up. One
  encoding, (N - 1) payloads received by each of N workers.
* "two_phase": a reduce-scatter and an all-gather. Worker r gets part r of all
  payloads, adds them up, and encodes the mean of the part for all. Two
  encodings, but bytes that do not grow with the workers. Codecs that cannot
  divide a payload encode every row of the array by itself.
* "rounds": the codec itself says what it sends, round by round.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import Division, stand_in_reply
from jaxmotion.collectives import _arguments, _layout
from jaxmotion.core import Array, PyTree, ShapedLike

_KINDS = {
  "sum": ("sum",),
  "gather": ("gather",),
  "two_phase": ("all_to_all", "gather"),
}


# Where a stack of arrays has its axis: behind that of the workers.
_PAYLOAD_AXES = {"all_to_all": 1, "gather": 0}
_REPLY_AXES = {"all_to_all": 1, "gather": 1}


class ReduceState(NamedTuple):
  """Codec state of the reduction of one array.

  Attributes:
    first: of this worker's own elements; stacked where rows are encoded.
    second: of the mean of a part; `()` unless the method is "two_phase".
  """

  first: PyTree
  second: PyTree


class Reduction(NamedTuple):
  """One array to reduce over workers.

  Attributes:
    x: the array, in the dtype that it is encoded in.
    state: this worker's state.
    op: "mean" or "sum" over workers.
    by_rows: whether two phases encode rows, whatever the codec.
  """

  codec: codecs.Codec
  x: Array
  state: ReduceState
  key: core.Key | None
  workers: int
  op: str
  by_rows: bool = False


ReductionRounds = codecs.Rounds[tuple[Array, ReduceState]]


def round_kinds(codec: codecs.Codec, method: str) -> tuple[str, ...]:
  """Returns the kinds of messages that a method sends, in order."""
  return codec.round_kinds if method == "rounds" else _KINDS[method]


def plan_messages(
  codec: codecs.Codec, like: ShapedLike, method: str, workers: int
) -> list[codecs.Message]:
  """Returns the messages that one worker sends to reduce an array."""
  # Nothing is computed: payloads have shapes in place of arrays. A codec's own
  # rounds are traced with stand-in replies.
  if method == "rounds":
    dtype = jnp.dtype(like.dtype).name
    return list(_trace_rounds(codec, tuple(like.shape), dtype, workers))
  if method != "two_phase":
    return [codecs.Message(method, codec.payload_like(like))]
  row = codec.payload_like(_layout.part_like(codec, like, workers))
  rows = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((workers, *a.shape), a.dtype), row
  )
  return [codecs.Message("all_to_all", rows), codecs.Message("gather", row)]


@functools.lru_cache(maxsize=1024)
def _trace_rounds(
  codec: codecs.Codec, shape: tuple[int, ...], dtype: str, workers: int
) -> tuple[codecs.Message, ...]:
  """Runs a codec's rounds on shapes, with stand-in replies."""

  def send_all(x: Array, state: PyTree) -> list[PyTree]:
    rounds = codec.reduce_in_rounds(x, state, core.make_key(0), workers)
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
  return tuple(map(codecs.Message, codec.round_kinds, payloads))


def init_state(
  codec: codecs.Codec,
  like: ShapedLike,
  method: str,
  workers: int,
  by_rows: bool,
) -> ReduceState:
  """Returns the fresh state of an array that is reduced by a method."""
  if method == "rounds":
    return ReduceState(codec.init_rounds(like, workers), ())
  if method != "two_phase":
    return ReduceState(codec.init(like), ())
  division = None if by_rows else _layout.find_division(codec, like, workers)
  if division is not None:
    return ReduceState(codec.init(like), codec.init(division.like))
  row = _layout.row_like(like, workers)
  return ReduceState(_arguments.init_rows(codec, workers, row), codec.init(row))


def reduce_array(reduction: Reduction, method: str) -> ReductionRounds:
  """Reduces an array by a method; returns the result and the new state."""
  if method == "rounds":
    return _reduce_by_codec(reduction)
  return _run_stages(reduction, method)


def reduce_stack(
  reductions: Sequence[Reduction], method: str
) -> codecs.Rounds[list[tuple[Array, ReduceState]]]:
  """Reduces arrays of one shape together; returns each one's result and
  state."""
  # Values and bytes are those of `reduce_array`. The program encodes and
  # decodes once, whatever the number of arrays: it compiles faster, and a
  # device starts fewer kernels.
  plan = _plan(reductions[0], method)
  inputs = [(r.x, r.state, r.key) for r in reductions]
  stacked = hosts.write_apart(_stack, *inputs)
  kinds = _KINDS[method]
  axes = [(_PAYLOAD_AXES[kind], 0) for kind in kinds] + [(0, 0)]
  begin, *others = (functools.partial(f, plan) for f in _STAGES[method])
  payload, carry = jax.vmap(begin, out_axes=axes[0])(stacked)
  for kind, stage, out_axes in zip(kinds, others, axes[1:], strict=True):
    reply = yield codecs.Message(kind, payload)
    run_stage = jax.vmap(stage, (0, _REPLY_AXES[kind]), out_axes)
    # XLA:CPU would otherwise decode in the update of each array, and compile
    # that as often.
    payload, carry = hosts.write_apart(run_stage, carry, reply)
  leaves, treedef = jax.tree.flatten((payload, carry))
  sizes = [1] * len(reductions)
  parts = zip(*(lax.split(a, sizes) for a in leaves), strict=True)
  return [
    jax.tree.unflatten(treedef, [lax.squeeze(a, (0,)) for a in part])
    for part in parts
  ]


def _stack(*trees: PyTree) -> PyTree:
  """Returns a tree whose arrays have a new leading axis."""
  return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


def _run_stages(r: Reduction, method: str) -> ReductionRounds:
  plan = _plan(r, method)
  begin, *others = _STAGES[method]
  payload, carry = begin(plan, (r.x, r.state, r.key))
  for kind, stage in zip(_KINDS[method], others, strict=True):
    reply = yield codecs.Message(kind, payload)
    payload, carry = stage(plan, carry, reply)
  return payload, carry


class _Plan(NamedTuple):
  """Codec, shape, workers and operation that the stages of a reduction share.

  Attributes:
    op: "mean" or "sum" over workers.
    division: how two phases divide payloads, or None if they encode rows.
  """

  codec: codecs.Codec
  like: ShapedLike
  workers: int
  op: str
  division: Division | None

  @property
  def part(self) -> ShapedLike:
    """Shape and dtype of the array whose mean one worker encodes."""
    if self.division is None:
      return _layout.row_like(self.like, self.workers)
    return self.division.like


def _plan(r: Reduction, method: str) -> _Plan:
  like = jax.ShapeDtypeStruct(r.x.shape, r.x.dtype)
  division = None
  if method == "two_phase" and not r.by_rows:
    division = _layout.find_division(r.codec, like, r.workers)
  return _Plan(r.codec, like, r.workers, r.op, division)


def _encode_whole(
  plan: _Plan, inputs: tuple[Array, ReduceState, core.Key | None]
) -> tuple[PyTree, PyTree]:
  x, state, key = inputs
  return plan.codec.encode(x, state.first, key)


def _decode_total(
  plan: _Plan, state: PyTree, total: PyTree
) -> tuple[Array, ReduceState]:
  return _finish_one_phase(plan, plan.codec.decode(total, plan.like), state)


def _decode_all(
  plan: _Plan, state: PyTree, payloads: PyTree
) -> tuple[Array, ReduceState]:
  total = plan.codec.sum_decoded(payloads, plan.like)
  return _finish_one_phase(plan, total, state)


def _finish_one_phase(
  plan: _Plan, total: Array, state: PyTree
) -> tuple[Array, ReduceState]:
  """Returns the mean or sum, and the state updated with the mean."""
  mean = total / plan.workers
  state = ReduceState(plan.codec.after_reduce(state, mean), ())
  return (mean if plan.op == "mean" else total), state


# Two phases average part r on worker r, then gather the encoded means of all
# parts. Rows are encoded one by one, each with its own state and key. The key
# of the mean's encoding is folded with `workers`, which is no row's index, so
# both encodings round independently.


def _encode_parts(
  plan: _Plan, inputs: tuple[Array, ReduceState, core.Key | None]
) -> tuple[PyTree, PyTree]:
  x, state, key = inputs
  if plan.division is None:
    parts, first = _layout.encode_shards(
      plan.codec, x, plan.workers, state.first, key
    )
  else:
    payload, first = plan.codec.encode(x, state.first, key)
    # Error memory keeps the payload, too: XLA:CPU would compute it twice.
    parts = hosts.write_apart(plan.division.divide, payload)
  return parts, (ReduceState(first, state.second), key)


def _encode_mean(
  plan: _Plan, carry: tuple[ReduceState, core.Key | None], received: PyTree
) -> tuple[PyTree, ReduceState]:
  state, key = carry
  codec, part = plan.codec, plan.part
  key = None if key is None else key.fold(plan.workers)
  payload, second = codec.encode_mean(received, part, state.second, key)
  if codec.needs_mean:
    second = codec.after_reduce(second, codec.decode(payload, part))
  return payload, ReduceState(state.first, second)


def _decode_parts(
  plan: _Plan, state: ReduceState, payloads: PyTree
) -> tuple[Array, ReduceState]:
  codec = plan.codec
  if plan.division is None:
    rows = jax.vmap(lambda p: codec.decode(p, plan.part))(payloads)
    first = jax.vmap(codec.after_reduce)(state.first, rows)
    y = _layout.join_rows(rows, plan.like)
  else:
    y = codec.decode(plan.division.join(payloads), plan.like)
    first = codec.after_reduce(state.first, y)
  if plan.op == "sum":
    y = y.astype(jnp.promote_types(y.dtype, jnp.float32)) * plan.workers
  return y, ReduceState(first, state.second)


_STAGES: dict[str, tuple[Callable[..., tuple[PyTree, PyTree]], ...]] = {
  "sum": (_encode_whole, _decode_total),
  "gather": (_encode_whole, _decode_all),
  "two_phase": (_encode_parts, _encode_mean, _decode_parts),
}
"""Functions between the messages of a method.

The first takes a plan and the array, its state and its key. The others take a
plan, what the one before carries, and the reply to its message. Each returns
the next message's payload, the last one the result, and what it carries on: at
the end, the new state.
"""


def _reduce_by_codec(r: Reduction) -> ReductionRounds:
  reduced = yield from r.codec.reduce_in_rounds(
    r.x, r.state.first, r.key, r.workers
  )
  mean = reduced.mean
  state = ReduceState(r.codec.after_reduce(reduced.state, mean), ())
  return (mean if r.op == "mean" else mean * r.workers), state
