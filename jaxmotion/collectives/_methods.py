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
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import Rounds, stand_in_reply
from jaxmotion.collectives import _layout, _rounds, _states
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

# Larger arrays are decoded where they are read: written to memory, 4M elements
# in 8 bits between two workers took 1.4 times as long.
_MAX_APART = 1 << 19

_Stage = Callable[..., Any]


def reduce_arrays(
  plans: Sequence[ArrayPlan],
  arrays: Sequence[Array],
  states: Sequence[ReduceState],
  keys: Sequence[core.Key | None],
  axis_name: AxisName,
  sending: hosts.Sending,
) -> tuple[list[Array], list[ReduceState]]:
  """Reduces arrays together; returns their results and the bundles' states."""
  # arrays: in the dtype that they are encoded in. states: this worker's, one
  # for each bundle.
  bundles = _layout.find_bundles(plans)
  firsts = [plans[bundle.stacks[0][0]] for bundle in bundles]
  results = _rounds.run_rounds(
    [
      _reduce_bundle(plans, bundle, arrays, state, keys)
      for bundle, state in zip(bundles, states, strict=True)
    ],
    # A codec of rounds says itself what it sends.
    [_KINDS.get(plan.method, plan.codec.round_kinds) for plan in firsts],
    axis_name,
    sending,
  )
  by_position: dict[int, Array] = {}
  for bundle, (of_bundle, _) in zip(bundles, results, strict=True):
    by_position |= zip(itertools.chain(*bundle.stacks), of_bundle, strict=True)
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


def _reduce_bundle(
  plans: Sequence[ArrayPlan],
  bundle: _layout.Bundle,
  arrays: Sequence[Array],
  state: ReduceState,
  keys: Sequence[core.Key | None],
) -> Rounds[tuple[list[Array], ReduceState]]:
  """Reduces the arrays of a bundle; returns their results, and its state."""
  stacks = [
    (plans[own[0]], [arrays[i] for i in own], [keys[i] for i in own])
    for own in bundle.stacks
  ]
  division = bundle.division
  if division is None:
    ((plan, arrays, keys),) = stacks
    return (yield from _reduce_stack(plan, arrays, state, keys))
  parts, firsts, blocks = [], [], []
  old_firsts = _states.split_firsts(bundle, state)
  for (plan, own, keys), first in zip(stacks, old_firsts, strict=True):
    encode, *_ = _make_stages(plan, len(own))
    x, key = hosts.stack_apart(list(zip(own, keys, strict=True)))
    payload, new = encode(x, ReduceState(first, ()), key)
    parts.append(jax.tree.map(_join_blocks, payload) if own[1:] else payload)
    firsts.append(new.first)
    blocks.append(len(own) * plan.part.shape[1])
  joined = jax.tree.map(lambda *a: jnp.concatenate(a, 2), *parts)
  # All parts are those of one array of more blocks.
  payload = jax.vmap(division.from_blocks)(joined)
  received = yield codecs.Message("all_to_all", payload)
  plan = plans[bundle.stacks[0][0]]._replace(division=division)
  _, encode_mean, *_ = _make_stages(plan, 1)
  payload, new = encode_mean(received, ReduceState((), state.second), None)
  reply = yield codecs.Message("gather", payload)
  reply = jax.vmap(division.to_blocks)(reply)
  take = lambda tree, start, _, count: jax.tree.map(
    lambda a: hosts.slice_at(a, start, count, 2), tree
  )
  replies = hosts.take_apart(take, [(None, count) for count in blocks], reply)
  results = []
  for i, ((plan, own, _), reply) in enumerate(
    zip(stacks, replies, strict=True)
  ):
    *_, decode, remember = _make_stages(plan, len(own))
    if own[1:]:
      split = functools.partial(_split_blocks, count=len(own))
      reply = jax.tree.map(split, reply)
    y, means = decode(reply)
    firsts[i] = remember(ReduceState(firsts[i], ()), means).first
    results += hosts.unstack_apart(y, own)
  return results, _states.join_firsts(firsts, new.second)


def _join_blocks(parts: Array) -> Array:
  """Joins the blocks of arrays: (workers, planes, arrays, blocks, ...)."""
  return parts.reshape(*parts.shape[:2], -1, *parts.shape[4:])


def _split_blocks(joined: Array, count: int) -> Array:
  """Splits what `_join_blocks` joined into arrays."""
  workers, planes, blocks, *rest = joined.shape
  return joined.reshape(workers, planes, count, blocks // count, *rest)


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
  *encoders, decode, remember = _make_stages(plan, len(arrays))
  x, key = hosts.stack_apart(list(zip(arrays, keys, strict=True)))
  reply: PyTree = x
  for kind, encode in zip(_KINDS[plan.method], encoders, strict=True):
    payload, state = encode(reply, state, key)
    reply = yield codecs.Message(kind, payload)
  y, means = decode(reply)
  return hosts.unstack_apart(y, arrays), remember(state, means)


@functools.lru_cache(maxsize=1024)
def _make_stages(plan: ArrayPlan, count: int) -> list[_Stage]:
  """Returns the stages of a method for a stack of so many arrays."""
  # Values and bytes are those of arrays that are reduced one by one. The
  # program encodes and decodes once, whatever the number of arrays: it compiles
  # faster, and a device starts fewer kernels. Arrays of one plan are traced
  # once.
  stages: list[_Stage] = [
    functools.partial(stage, plan)
    for stage in (*_STAGES[plan.method], _remember)
  ]
  if count > 1:
    kinds = _KINDS[plan.method]
    payloads = [2 if plan.joins else _PAYLOAD_AXES[kind] for kind in kinds]
    replies = [2 if plan.joins else _REPLY_AXES[kind] for kind in kinds]
    in_axes = [*((axis, 0, 0) for axis in (0, *replies[:-1])), replies[-1:], 0]
    out_axes = [(axis, 0) for axis in payloads] + [0, 0]
    stack = functools.partial(jax.vmap, axis_size=count)
    stages = list(map(stack, stages, in_axes, out_axes))
  *encoders, decode, remember = stages
  # XLA:CPU would decode in the update of each array, and compile that for each.
  # A sum is decoded by an operation or two.
  is_large = math.prod(plan.like.shape) > _MAX_APART
  is_apart = count > 1 or not (is_large or plan.method == "sum")
  decode = (hosts.make_apart if is_apart else core.trace_once)(decode)
  return [*map(core.trace_once, encoders), decode, remember]


def _encode_whole(
  plan: ArrayPlan, x: Array, state: ReduceState, key: core.Key | None
) -> tuple[PyTree, ReduceState]:
  """Encodes an array for all workers."""
  payload, first = plan.codec.encode(x, state.first, key)
  return payload, ReduceState(first, ())


def _decode_sum(plan: ArrayPlan, reply: PyTree) -> tuple[Array, PyTree]:
  """Decodes all payloads, or their sum, to the result."""
  is_added = plan.method == "sum"
  decode = plan.codec.decode if is_added else plan.codec.sum_decoded
  total = decode(reply, plan.like)
  mean = total / plan.workers
  y = mean if plan.op == "mean" else total
  return y, mean if plan.codec.needs_mean else ()


# Two phases average part r on worker r, then gather the encoded means of all
# parts. Rows are encoded one by one, each with its own state and key. The key
# of the mean's encoding is folded with `workers`, which is no row's index, so
# both encodings round independently.


def _encode_parts(
  plan: ArrayPlan, x: Array, state: ReduceState, key: core.Key | None
) -> tuple[PyTree, ReduceState]:
  """Encodes an array in parts, one for each worker."""
  if plan.division is None:
    parts, first = _layout.encode_shards(
      plan.codec, x, plan.workers, state.first, key
    )
    return parts, ReduceState(first, state.second)
  division = plan.division
  divide = division.divide_blocks if plan.joins else division.divide
  payload, first = plan.codec.encode(x, state.first, key)
  # Error memory keeps the payload, too: XLA:CPU would compute it twice.
  return hosts.write_apart(divide, payload), ReduceState(first, state.second)


def _encode_mean(
  plan: ArrayPlan, received: PyTree, state: ReduceState, key: core.Key | None
) -> tuple[PyTree, ReduceState]:
  """Encodes the mean of this worker's part for all."""
  codec, part = plan.codec, plan.part
  key = None if key is None else key.fold(plan.workers)
  payload, second = codec.encode_mean(received, part, state.second, key)
  if codec.needs_mean:
    second = codec.after_reduce(second, codec.decode(payload, part))
  return payload, ReduceState(state.first, second)


def _decode_parts(plan: ArrayPlan, payloads: PyTree) -> tuple[Array, PyTree]:
  """Decodes the means of all parts to the result."""
  codec = plan.codec
  if plan.division is None:
    means = jax.vmap(lambda p: codec.decode(p, plan.part))(payloads)
    y = _layout.join_rows(means, plan.like)
  else:
    division = plan.division
    join = division.join_blocks if plan.joins else division.join
    means = y = codec.decode(join(payloads), plan.like)
  if plan.op == "sum":
    y = y.astype(jnp.promote_types(y.dtype, jnp.float32)) * plan.workers
  return y, means if codec.needs_mean else ()


def _remember(
  plan: ArrayPlan, state: ReduceState, means: PyTree
) -> ReduceState:
  """Returns the state after the means of what was encoded are known."""
  if not plan.codec.needs_mean:
    return state
  update = plan.codec.after_reduce
  update = jax.vmap(update) if plan.encodes_rows else update
  return ReduceState(update(state.first, means), state.second)


_STAGES: dict[str, tuple[_Stage, ...]] = {
  "sum": (_encode_whole, _decode_sum),
  "gather": (_encode_whole, _decode_sum),
  "two_phase": (_encode_parts, _encode_mean, _decode_parts),
}
"""What a method computes for each message, and from the last reply.

An encoder takes a plan, the array or the reply to the message before, the state
and a key; it returns a payload and the new state. The last stage takes a plan
and a reply; it returns the result, and the means of what was encoded if the
codec needs them.
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
