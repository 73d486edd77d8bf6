"""Rounds of many reductions, run together: few collectives for a whole tree.

A collective costs round trips however little it moves. So reductions advance
in lockstep: all that send the same kind of message share one collective.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import KINDS
from jaxmotion.collectives import _sum_payloads, _transport
from jaxmotion.core import AxisName, PyTree


class Round(NamedTuple):
  """One collective that several reductions share.

  Attributes:
    kind: the kind of the messages.
    members: positions of the reductions that send one.
  """

  kind: str
  members: tuple[int, ...]


def schedule_rounds(kinds: Sequence[Sequence[str]]) -> list[Round]:
  """Joins the rounds of many reductions into few collectives.

  A reduction waits where its message can travel later with that of another one.
  So the number of collectives of a kind is that of the reduction that needs
  most of them. It is larger if two reductions need two kinds in opposite
  orders.

  Args:
    kinds: for each reduction, the kinds of its rounds in order.

  Example:
    >>> schedule_rounds([("gather",), ("all_to_all", "gather")])
    [Round(kind='all_to_all', members=(1,)), Round(kind='gather', \
members=(0, 1))]
  """
  left = []
  for own in core.check_sequence("kinds", kinds, "sequences of kinds"):
    left.append(list(core.check_sequence("kinds", own, "sequences of kinds")))
    for kind in left[-1]:
      core.check_choice("kinds", kind, KINDS)
  rounds = []
  while any(left):
    first = {own[0] for own in left if own}
    awaited = {kind for own in left for kind in own[1:] if kind != own[0]}
    kind = min(first - awaited or first, key=KINDS.index)
    ready = [i for i, own in enumerate(left) if own and own[0] == kind]
    most = max(left[i].count(kind) for i in ready)
    members = tuple(i for i in ready if left[i].count(kind) == most)
    for i in members:
      left[i].pop(0)
    rounds.append(Round(kind, members))
  return rounds


def run_rounds(
  reductions: Sequence[codecs.Rounds[Any]],
  kinds: Sequence[Sequence[str]],
  axis_name: AxisName,
) -> list[Any]:
  """Runs reductions together and returns what each of them returns."""
  ahead: list[codecs.Message | None] = [None] * len(reductions)
  results: list[Any] = [None] * len(reductions)
  for kind, members in schedule_rounds(kinds):
    # A reduction starts when its first message is due: what it encodes is then
    # close to what sends it.
    messages = [ahead[i] or next(reductions[i]) for i in members]
    for message in messages:
      if message.kind != kind:
        raise ValueError(
          f"`kinds` must be those of the messages in their order, got {kind!r} "
          f"for a message of {message.kind!r}."
        )
    replies = _SEND[kind]([m.payload for m in messages], axis_name)
    for i, reply in zip(members, replies, strict=True):
      try:
        ahead[i] = reductions[i].send(reply)
      except StopIteration as stop:
        results[i] = stop.value
  return results


def _max_payloads(payloads: list[PyTree], axis_name: AxisName) -> list[PyTree]:
  """Returns the greatest element of any worker, for all elements."""
  leaves, treedef = jax.tree.flatten(core.to_varying(payloads, axis_name))
  by_dtype: dict[Any, list[int]] = {}
  for i, leaf in enumerate(leaves):
    by_dtype.setdefault(leaf.dtype, []).append(i)
  for members in by_dtype.values():
    greatest = lax.pmax(_sum_payloads.join_flat(leaves, members), axis_name)
    _sum_payloads.split_flat(leaves, members, greatest)
  return jax.tree.unflatten(treedef, leaves)


_SEND = {
  "all_to_all": _transport.exchange_rows,
  "gather": _transport.gather_payloads,
  "sum": _sum_payloads.sum_payloads,
  "max": _max_payloads,
}
