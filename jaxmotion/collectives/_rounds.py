"""Driver of rounds, run together: few collectives for a whole tree.

A collective of one array is written as a generator of rounds. A collective over
the link costs round trips however little it moves. So the generators advance in
lockstep: all that send the same kind of message share one.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import Rounds
from jaxmotion.collectives import _transport
from jaxmotion.core import AxisName, PyTree


class Round(NamedTuple):
  """One collective that several arrays share.

  Attributes:
    kind: the kind of the messages.
    members: positions of the arrays that send one.
  """

  kind: str
  members: tuple[int, ...]


def schedule_rounds(kinds: Sequence[Sequence[str]]) -> list[Round]:
  """Joins the rounds of many arrays into few collectives."""
  # An array waits where its message can travel later with that of another one.
  # So the number of collectives of a kind is that of the array that needs most
  # of them. It is larger if two arrays need two kinds in opposite orders.
  # kinds: for each array, the kinds of its rounds in order.
  return list(_schedule(tuple(map(tuple, kinds))))


@functools.lru_cache(maxsize=1024)
def _schedule(kinds: tuple[tuple[str, ...], ...]) -> tuple[Round, ...]:
  left = list(map(list, kinds))
  rounds = []
  while any(left):
    first = {own[0] for own in left if own}
    awaited = {kind for own in left for kind in own[1:] if kind != own[0]}
    kind = min(first - awaited or first, key=list(_SEND).index)
    ready = [i for i, own in enumerate(left) if own and own[0] == kind]
    most = max([left[i].count(kind) for i in ready])
    members = tuple([i for i in ready if left[i].count(kind) == most])
    for i in members:
      left[i].pop(0)
    rounds.append(Round(kind, members))
  return tuple(rounds)


Send = Callable[[list[PyTree], AxisName, hosts.Sending], list[PyTree]]


def run_rounds(
  rounds: Sequence[Rounds[Any]],
  kinds: Sequence[Sequence[str]],
  axis_name: AxisName,
  sending: hosts.Sending = hosts.AT_ONCE,
  send: Mapping[str, Send] | None = None,
) -> list[Any]:
  """Runs the rounds of many arrays together; returns what each returns."""
  # kinds: of the messages of each array, in order. send: how some kinds travel,
  # if not as in `_SEND`.
  send = _SEND | dict(send or {})
  ahead: list[codecs.Message | None] = [None] * len(rounds)
  results: list[Any] = [None] * len(rounds)
  for kind, members in _schedule(tuple(map(tuple, kinds))):
    # An array starts when its first message is due: what it encodes is then
    # close to what sends it.
    messages = [ahead[i] or next(rounds[i]) for i in members]
    for message in messages:
      if message.kind != kind:
        raise ValueError(
          f"`kinds` must be those of the messages in their order, got {kind!r} "
          f"for a message of {message.kind!r}."
        )
    replies = send[kind]([m.payload for m in messages], axis_name, sending)
    for i, reply in zip(members, replies, strict=True):
      try:
        ahead[i] = rounds[i].send(reply)
      except StopIteration as stop:
        results[i] = stop.value
  return results


def run_one(
  rounds: Rounds[Any],
  kind: str,
  axis_name: AxisName,
  sending: hosts.Sending = hosts.AT_ONCE,
) -> Any:
  """Runs the rounds of one array that sends one message."""
  (result,) = run_rounds([rounds], [(kind,)], axis_name, sending)
  return result


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


# In the order in which rounds that wait for no other are run.
_SEND: dict[str, Send] = {
  "all_to_all": _transport.exchange_rows,
  "gather": _transport.gather_payloads,
  "sum": _transport.sum_payloads,
  "max": _max_payloads,
  "scatter": _transport.scatter_payloads,
}
