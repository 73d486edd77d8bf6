"""Rounds of many reductions, run together: few collectives for a whole tree.

A collective costs round trips however little it moves. So reductions advance
in lockstep: all that send the same kind of message share one collective.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import KINDS
from jaxmotion.collectives import _methods, _transport
from jaxmotion.core import Array, AxisName, PyTree

# A stack copies its arrays. That takes longer than it spares for large ones.
_MAX_SIZE = 1 << 14
_STACKABLE = ("gather", "two_phase")


def find_stacks(
  reductions: Sequence[_methods.Reduction],
  methods: Sequence[str],
  sending: hosts.Sending = hosts.AT_ONCE,
) -> list[list[int]]:
  """Returns the positions of arrays that are reduced together, in order."""
  # Payloads that the network adds up stay apart: to make one is an operation or
  # two. So do arrays of a step of several programs: each is sent as soon as its
  # gradient is there.
  found: dict[Hashable, list[int]] = {}
  for i, (reduction, method) in enumerate(
    zip(reductions, methods, strict=True)
  ):
    key: Hashable = i
    is_small = reduction.x.size <= _MAX_SIZE
    if is_small and method in _STACKABLE and not sending.has_pieces:
      key = (reduction.codec, method, _describe_inputs(reduction))
    found.setdefault(key, []).append(i)
  return list(found.values())


def run_reductions(
  reductions: Sequence[_methods.Reduction],
  methods: Sequence[str],
  axis_name: AxisName,
  sending: hosts.Sending,
) -> list[tuple[Array, _methods.ReduceState]]:
  """Runs all reductions together; returns each one's result and new state."""
  stacks = find_stacks(reductions, methods, sending)
  results = run_rounds(
    [
      _methods.reduce_stack([reductions[i] for i in stack], methods[stack[0]])
      if len(stack) > 1
      else _methods.reduce_array(reductions[stack[0]], methods[stack[0]])
      for stack in stacks
    ],
    [
      _methods.round_kinds(reductions[stack[0]].codec, methods[stack[0]])
      for stack in stacks
    ],
    axis_name,
    sending,
  )
  by_position: dict[int, Any] = {}
  for stack, found in zip(stacks, results, strict=True):
    by_position |= zip(stack, found if len(stack) > 1 else [found], strict=True)
  return [by_position[i] for i in range(len(reductions))]


def _describe_inputs(reduction: _methods.Reduction) -> Hashable:
  """Returns the types of a reduction's arrays and the form of its state."""
  inputs: PyTree = (reduction.x, reduction.state, reduction.key)
  leaves, treedef = jax.tree.flatten(inputs)
  return treedef, tuple(jax.typeof(x) for x in leaves)


class Round(NamedTuple):
  """One collective that several reductions share.

  Attributes:
    kind: the kind of the messages.
    members: positions of the reductions that send one.
  """

  kind: str
  members: tuple[int, ...]


def schedule_rounds(kinds: Sequence[Sequence[str]]) -> list[Round]:
  """Joins the rounds of many reductions into few collectives."""
  # A reduction waits where its message can travel later with that of another
  # one. So the number of collectives of a kind is that of the reduction that
  # needs most of them. It is larger if two reductions need two kinds in
  # opposite orders.
  # kinds: for each reduction, the kinds of its rounds in order.
  return list(_schedule(tuple(map(tuple, kinds))))


@functools.lru_cache(maxsize=1024)
def _schedule(kinds: tuple[tuple[str, ...], ...]) -> tuple[Round, ...]:
  left = list(map(list, kinds))
  rounds = []
  while any(left):
    first = {own[0] for own in left if own}
    awaited = {kind for own in left for kind in own[1:] if kind != own[0]}
    kind = min(first - awaited or first, key=KINDS.index)
    ready = [i for i, own in enumerate(left) if own and own[0] == kind]
    most = max([left[i].count(kind) for i in ready])
    members = tuple([i for i in ready if left[i].count(kind) == most])
    for i in members:
      left[i].pop(0)
    rounds.append(Round(kind, members))
  return tuple(rounds)


def run_rounds(
  reductions: Sequence[codecs.Rounds[Any]],
  kinds: Sequence[Sequence[str]],
  axis_name: AxisName,
  sending: hosts.Sending = hosts.AT_ONCE,
) -> list[Any]:
  """Runs reductions together and returns what each of them returns."""
  ahead: list[codecs.Message | None] = [None] * len(reductions)
  results: list[Any] = [None] * len(reductions)
  for kind, members in _schedule(tuple(map(tuple, kinds))):
    # A reduction starts when its first message is due: what it encodes is then
    # close to what sends it.
    messages = [ahead[i] or next(reductions[i]) for i in members]
    for message in messages:
      if message.kind != kind:
        raise ValueError(
          f"`kinds` must be those of the messages in their order, got {kind!r} "
          f"for a message of {message.kind!r}."
        )
    replies = _SEND[kind]([m.payload for m in messages], axis_name, sending)
    for i, reply in zip(members, replies, strict=True):
      try:
        ahead[i] = reductions[i].send(reply)
      except StopIteration as stop:
        results[i] = stop.value
  return results


def _max_payloads(
  payloads: list[PyTree], axis_name: AxisName, sending: hosts.Sending
) -> list[PyTree]:
  """Returns the greatest element of any worker, for all elements."""
  del sending  # They are small, and sent at once.
  leaves, treedef = jax.tree.flatten(core.to_varying(payloads, axis_name))
  by_dtype: dict[Any, list[int]] = {}
  for i, leaf in enumerate(leaves):
    by_dtype.setdefault(leaf.dtype, []).append(i)
  for members in by_dtype.values():
    greatest = lax.pmax(_transport.join_flat(leaves, members), axis_name)
    _transport.split_flat(leaves, members, greatest)
  return jax.tree.unflatten(treedef, leaves)


_SEND: dict[str, Callable[..., list[PyTree]]] = {
  "all_to_all": _transport.exchange_rows,
  "gather": _transport.gather_payloads,
  "sum": _transport.sum_payloads,
  "max": _max_payloads,
}
