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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import Rounds, stand_in_reply
from jaxmotion.collectives import _layout, _rounds
from jaxmotion.collectives._layout import ArrayPlan
from jaxmotion.collectives._states import ReduceState
from jaxmotion.core import Array, AxisName, PyTree

# The kinds of messages that a method sends, in order.
_KINDS = {
  "sum": ("sum",),
  "gather": ("gather",),
  "two_phase": ("all_to_all", "gather"),
}
# Where a stack of arrays has its axis: behind that of the workers.
_PAYLOAD_AXES = {"all_to_all": 1, "gather": 0}
_REPLY_AXES = {"all_to_all": 1, "gather": 1}


def reduce_arrays(
  plans: Sequence[ArrayPlan],
  arrays: Sequence[Array],
  states: Sequence[ReduceState],
  keys: Sequence[core.Key | None],
  axis_name: AxisName,
  sending: hosts.Sending,
) -> tuple[list[Array], list[ReduceState]]:
  """Reduces arrays together; returns their results and the stacks' states."""
  # arrays: in the dtype that they are encoded in. states: this worker's, one
  # for each stack.
  groups = _layout.find_stacks(plans)
  firsts = [plans[group[0]] for group in groups]
  results = _rounds.run_rounds(
    [
      _reduce_stack(
        plan, [arrays[i] for i in group], state, [keys[i] for i in group]
      )
      for plan, group, state in zip(firsts, groups, states, strict=True)
    ],
    # A codec of rounds says itself what it sends.
    [_KINDS.get(plan.method, plan.codec.round_kinds) for plan in firsts],
    axis_name,
    sending,
  )
  by_position: dict[int, Array] = {}
  for group, (of_group, _) in zip(groups, results, strict=True):
    by_position |= zip(group, of_group, strict=True)
  new_states = [state for _, state in results]
  return [by_position[i] for i in range(len(plans))], new_states


def plan_messages(plan: ArrayPlan) -> list[codecs.Message]:
  """Returns the messages that one worker sends to reduce an array."""
  # Nothing is computed: payloads have shapes in place of arrays. A codec's own
  # rounds are traced with stand-in replies.
  if plan.method == "rounds":
    return list(_trace_rounds(plan.codec, plan.like, plan.workers))
  if plan.method != "two_phase":
    return [codecs.Message(plan.method, plan.codec.payload_like(plan.like))]
  row = plan.codec.payload_like(plan.part)
  rows = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct((plan.workers, *a.shape), a.dtype), row
  )
  return [codecs.Message("all_to_all", rows), codecs.Message("gather", row)]


@functools.lru_cache(maxsize=1024)
def _trace_rounds(
  codec: codecs.Codec, like: jax.ShapeDtypeStruct, workers: int
) -> tuple[codecs.Message, ...]:
  """Runs a codec's rounds on shapes, with stand-in replies."""

  def send_all(x: Array, state: PyTree) -> list[PyTree]:
    """Traces a codec's rounds; returns the payload that each one sends."""
    rounds = codec.reduce_in_rounds(x, state, core.make_key(0), workers)
    reply, payloads = None, []
    for _ in codec.round_kinds:
      message = rounds.send(reply)
      payloads.append(message.payload)
      reply = stand_in_reply(message, workers)
    rounds.close()  # What follows the last message sends nothing.
    return payloads

  state = jax.eval_shape(lambda: codec.init_rounds(like, workers))
  payloads = jax.eval_shape(send_all, like, state)
  return tuple(map(codecs.Message, codec.round_kinds, payloads))


def _reduce_stack(
  plan: ArrayPlan,
  arrays: Sequence[Array],
  state: ReduceState,
  keys: Sequence[core.Key | None],
) -> Rounds[tuple[list[Array], ReduceState]]:
  """Reduces arrays of one plan together; returns each result, and the state."""
  if plan.method == "rounds":
    y, state = yield from _reduce_by_codec(plan, arrays[0], state, keys[0])
    return [y], state
  kinds = _KINDS[plan.method]
  stages: list[_Stage] = [
    functools.partial(stage, plan) for stage in _STAGES[plan.method]
  ]
  begin, *others = stages
  if len(arrays) == 1:
    inputs = arrays[0], state, keys[0]
    y, state = yield from _run_stages(kinds, begin, others, inputs)
    return [y], state
  # Values and bytes are those of arrays that are reduced one by one. The
  # program encodes and decodes once, whatever the number of arrays: it compiles
  # faster, and a device starts fewer kernels.
  stack_all = lambda *trees: jax.tree.map(lambda *a: jnp.stack(a), *trees)
  pairs = zip(arrays, keys, strict=True)
  x, key = hosts.write_apart(stack_all, *pairs)
  axes = [(_PAYLOAD_AXES[kind], 0) for kind in kinds] + [(0, 0)]
  # XLA:CPU would otherwise decode in the update of each array, and compile that
  # as often.
  apart = [
    functools.partial(
      hosts.write_apart, jax.vmap(stage, (0, _REPLY_AXES[kind]), out_axes)
    )
    for kind, stage, out_axes in zip(kinds, others, axes[1:], strict=True)
  ]
  begin = jax.vmap(begin, out_axes=axes[0])
  y, state = yield from _run_stages(kinds, begin, apart, (x, state, key))
  # Updates of equal shapes are compiled once, unless each reads another row.
  rows = hosts.write_apart(lambda y: lax.split(y, [1] * len(y)), y)
  return list(map(_take_row, rows, arrays)), state


def _take_row(row: Array, x: Array) -> Array:
  """Returns the result of one array of a stack, typed as varying like it."""
  # A stack varies over the axes of a model that any of its arrays varies over.
  y, axes = lax.squeeze(row, (0,)), core.varying_axes(row)
  others = tuple(sorted(axes - core.varying_axes(x), key=str))
  return core.assert_replicated(y, others) if others else y


_Stage = Callable[..., tuple[PyTree, PyTree]]


def _run_stages(
  kinds: Sequence[str], begin: _Stage, others: Sequence[_Stage], inputs: PyTree
) -> Rounds[Any]:
  """Runs the stages of a method, and between them sends what each returns."""
  payload, carry = begin(inputs)
  for kind, stage in zip(kinds, others, strict=True):
    reply = yield codecs.Message(kind, payload)
    payload, carry = stage(carry, reply)
  return payload, carry


def _encode_whole(
  plan: ArrayPlan, inputs: tuple[Array, ReduceState, core.Key | None]
) -> tuple[PyTree, PyTree]:
  """Encodes an array for all workers; carries the codec's new state."""
  x, state, key = inputs
  return plan.codec.encode(x, state.first, key)


def _decode_sum(
  plan: ArrayPlan, state: PyTree, reply: PyTree
) -> tuple[Array, ReduceState]:
  """Decodes all payloads, or their sum, to the result and the new state."""
  is_added = plan.method == "sum"
  decode = plan.codec.decode if is_added else plan.codec.sum_decoded
  total = decode(reply, plan.like)
  mean = total / plan.workers
  state = ReduceState(plan.codec.after_reduce(state, mean), ())
  return (mean if plan.op == "mean" else total), state


# Two phases average part r on worker r, then gather the encoded means of all
# parts. Rows are encoded one by one, each with its own state and key. The key
# of the mean's encoding is folded with `workers`, which is no row's index, so
# both encodings round independently.


def _encode_parts(
  plan: ArrayPlan, inputs: tuple[Array, ReduceState, core.Key | None]
) -> tuple[PyTree, PyTree]:
  """Encodes an array in parts, one for each worker; carries state and key."""
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
  plan: ArrayPlan, carry: tuple[ReduceState, core.Key | None], received: PyTree
) -> tuple[PyTree, ReduceState]:
  """Encodes the mean of this worker's part for all; carries the new state."""
  state, key = carry
  codec, part = plan.codec, plan.part
  key = None if key is None else key.fold(plan.workers)
  payload, second = codec.encode_mean(received, part, state.second, key)
  if codec.needs_mean:
    second = codec.after_reduce(second, codec.decode(payload, part))
  return payload, ReduceState(state.first, second)


def _decode_parts(
  plan: ArrayPlan, state: ReduceState, payloads: PyTree
) -> tuple[Array, ReduceState]:
  """Decodes the means of all parts to the result and the new state."""
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


_STAGES: dict[str, tuple[_Stage, ...]] = {
  "sum": (_encode_whole, _decode_sum),
  "gather": (_encode_whole, _decode_sum),
  "two_phase": (_encode_parts, _encode_mean, _decode_parts),
}
"""Functions between the messages of a method.

The first takes a plan and the array, its state and its key. The others take a
plan, what the one before carries, and the reply to its message. Each returns
the next message's payload, the last one the result, and what it carries on: at
the end, the new state.
"""


def _reduce_by_codec(
  plan: ArrayPlan, x: Array, state: ReduceState, key: core.Key | None
) -> Rounds[tuple[Array, ReduceState]]:
  """Returns the rounds of a codec that says itself what it sends."""
  reduced = yield from plan.codec.reduce_in_rounds(
    x, state.first, key, plan.workers
  )
  mean = reduced.mean
  state = ReduceState(plan.codec.after_reduce(reduced.state, mean), ())
  return (mean if plan.op == "mean" else mean * plan.workers), state
