"""Driver of rounds, run together: few collectives for a whole tree.

A collective of one array is written as a generator of rounds. A collective over
the link costs round trips however little it moves. So the generators advance in
lockstep: all that send the same kind of message share one. Those below the
driver send one message each.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.codecs import Codec, Message, identity
from jaxmotion.codecs.extend import Rounds, check_codec, fold_paths, partition
from jaxmotion.collectives import _layout, _transport
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike


class Round(NamedTuple):
  """One collective that several arrays share."""

  kind: str  # Of the messages.
  members: tuple[int, ...]  # Positions of the arrays that send one.


@functools.lru_cache(maxsize=1024)
def schedule_rounds(kinds: tuple[tuple[str, ...], ...]) -> tuple[Round, ...]:
  """Joins the rounds of many arrays into few collectives."""
  # An array waits where its message can travel later with that of another one.
  # So the number of collectives of a kind is that of the array that needs most
  # of them. It is larger if two arrays need two kinds in opposite orders.
  # kinds: for each array, the kinds of its rounds in order.
  remaining = list(map(list, kinds))
  rounds = []
  while any(remaining):
    first = {own[0] for own in remaining if own}
    awaited = {kind for own in remaining for kind in own[1:] if kind != own[0]}
    kind = min(first - awaited or first, key=list(_SEND).index)
    due = [i for i, own in enumerate(remaining) if own[:1] == [kind]]
    most = max([remaining[i].count(kind) for i in due])
    members = tuple([i for i in due if remaining[i].count(kind) == most])
    for i in members:
      remaining[i].pop(0)
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
  """Runs the rounds of many arrays together; returns the result of each."""
  # Messages of one kind that are due together travel in one collective.
  # kinds: of the messages of each array, in order. send: how some kinds travel,
  # if not as in `_SEND`.
  send = _SEND | dict(send or {})
  # The message that each array sends next, once it has started.
  ahead: list[Message | None] = [None] * len(rounds)
  results: list[Any] = [None] * len(rounds)
  for kind, members in schedule_rounds(tuple(map(tuple, kinds))):
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
  # Payloads are small, and sent at once whatever `sending` says.
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


class LeafCodec(NamedTuple):
  """Codec of one leaf of a tree, and the leaf's key."""

  codec: Codec
  key: core.Key | None


def find_leaf_codecs(
  name: str,
  codec: Codec | None,
  tree: PyTree,
  key: core.Key | None = None,
  *,
  prefix: str = "",
  stateless: bool = False,
) -> list[LeafCodec]:
  """Finds the codec and key of every leaf, where leaves are not joined."""
  # prefix: comes before a leaf's path in its key, so it is part of every random
  # bit.
  arrays = partition(identity() if codec is None else codec, tree)
  paths = [prefix + path for path, _ in arrays.leaves]
  keys = [None] * len(paths) if key is None else fold_paths(key, paths)
  by_position: dict[int, LeafCodec] = {}
  for group in arrays.leaf_groups:
    if len(group.leaves) > 1:
      raise ValueError(
        f"`{name}` must encode every leaf by itself, got one that joins some: "
        f"{codec!r}."
      )
    check_codec(name, group.codec, stateless=stateless, one_round=True)
    (leaf,) = group.leaves
    by_position[leaf] = LeafCodec(group.codec, keys[leaf])
  return [by_position[i] for i in range(len(arrays.leaves))]


def gather_array(
  codec: Codec, x: Array, state: PyTree, key: core.Key | None
) -> Rounds[tuple[Array, PyTree]]:
  """Gathers an array; returns every worker's, stacked, and the new state."""
  own = _layout.to_encode_dtype(codec, x)
  payload, state = codec.encode(own, state, key)
  gathered = yield Message("gather", payload)
  return jax.vmap(lambda p: codec.decode(p, own))(gathered), state


def exchange_rows(
  codec: Codec, rows: Array, state: PyTree, key: core.Key | None
) -> Rounds[tuple[Array, PyTree]]:
  """Sends row r to worker r; returns the rows it received, and new states."""
  payload, state = _layout.encode_rows(codec, rows, state, key)
  received = yield Message("all_to_all", payload)
  row = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
  return jax.vmap(lambda p: codec.decode(p, row))(received), state


def sum_rows(
  codec: Codec,
  rows: Array,
  row: ShapedLike,
  state: PyTree,
  key: core.Key | None,
  kind: str,
) -> Rounds[tuple[Array, PyTree, PyTree]]:
  """Sums a row over workers; returns the sum, its own payload, and states."""
  # row: shape and dtype that a row is decoded to. kind: "all_to_all", or
  # "scatter" for payloads that the network adds up.
  payload, state = _layout.encode_rows(codec, rows, state, key)
  received = yield Message(kind, payload)
  if kind == "scatter":
    return codec.decode(received, row), payload, state
  return codec.sum_decoded(received, row), payload, state


def scatter_means(
  rows: Sequence[Array],
  codecs: Sequence[LeafCodec],
  states: Sequence[PyTree],
  axis_name: AxisName,
  sending: hosts.Sending = hosts.AT_ONCE,
) -> tuple[list[Array], list[PyTree]]:
  """Reduces arrays to this worker's row of each mean, in few collectives."""
  # rows: (workers, ...) for each array, this worker's own. states: one for each
  # row, stacked.
  # Payloads that are small, or not summable, travel in one all-to-all. Means
  # are in float32 or wider, or in the array's own dtype from codecs that keep
  # it.
  workers = core.axis_size(axis_name)
  kinds, rounds = [], []
  for x, leaf, state in zip(rows, codecs, states, strict=True):
    row = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    kind = choose_kind(leaf.codec, row)
    own = core.to_varying(x, axis_name)
    own = _layout.to_encode_dtype(leaf.codec, own)
    kinds.append((kind,))
    rounds.append(sum_rows(leaf.codec, own, row, state, leaf.key, kind))
  results = run_rounds(rounds, kinds, axis_name, sending)
  means = [total / workers for total, _, _ in results]
  return means, [state for _, _, state in results]


def choose_kind(codec: Codec, row: ShapedLike) -> str:
  """Returns the kind of message that sums the rows of an array."""
  # A collective for each small array would cost round trips: they join the
  # all-to-all, which has as many bytes. The choice depends on the array alone,
  # since it decides the order of the sum.
  is_large = math.prod(row.shape) >= _transport.MIN_ELEMENTS_ALONE
  is_alone = is_large and _layout.is_summed(codec, row)
  return "scatter" if is_alone else "all_to_all"


def average_locally(
  rows: Sequence[Array],
  codecs: Sequence[LeafCodec],
  axes: core.HostAxes,
  sending: hosts.Sending = hosts.AT_ONCE,
) -> list[Array]:
  """Returns the means within a host of the rows that this device reduces."""
  # rows: (workers, ...) for each array, this worker's own, host by host.
  # Returns (hosts, ...): the rows of this device's place on each host. Codecs
  # are without state.
  devices = core.axis_size(axes.devices)
  by_device = [
    a.reshape(-1, devices, *a.shape[1:]).swapaxes(0, 1) for a in rows
  ]
  states: list[PyTree] = [()] * len(rows)
  means, _ = scatter_means(by_device, codecs, states, axes.devices, sending)
  return core.to_varying(means, axes)


def gather_shards(
  shards: Sequence[Array],
  codecs: Sequence[LeafCodec],
  axis_name: AxisName,
  sending: hosts.Sending = hosts.AT_ONCE,
  mark: Callable[[PyTree, AxisName], PyTree] = lambda words, axis_name: words,
) -> list[Array]:
  """Returns all shards of every array, host by host: (workers, ...)."""
  # All payloads travel in one buffer. With `HostAxes` they travel between hosts
  # first, so that each payload crosses to another host once. The devices of a
  # host then forward the words.
  # All workers decode the same words, so the result has the same bits
  # everywhere and is typed as replicated.
  # mark: applied to what was gathered along an axis, still encoded.
  senders, devices = core.split_axes(axis_name)

  def gather(
    payloads: list[PyTree], _: AxisName, sending: hosts.Sending
  ) -> list[PyTree]:
    """Returns every worker's payloads, gathered along one axis or two."""
    for axis in (senders, devices) if devices else (senders,):
      payloads = _transport.gather_payloads(payloads, axis, sending)
      payloads = mark(payloads, axis)
    if not devices:
      return payloads
    # From (devices, hosts, ...) to (workers, ...), host by host.
    return jax.tree.map(
      lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), payloads
    )

  results = run_rounds(
    [
      gather_array(leaf.codec, x, (), leaf.key)
      for x, leaf in zip(shards, codecs, strict=True)
    ],
    [("gather",)] * len(shards),
    axis_name,
    sending,
    {"gather": gather},
  )
  return [rows for rows, _ in results]
