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

# Most elements of an array that is encoded with others. States are stacked at
# every step: 64 matrices of 256 x 256 with error memory took 1.8 times as long.
_MAX_ALIKE = 1 << 14


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


@functools.lru_cache(maxsize=1024)
def _make_coders(
  codec: Codec, like: jax.ShapeDtypeStruct, has_rows: bool, count: int
) -> tuple[Callable[..., tuple[PyTree, PyTree]], Callable[[PyTree], Array]]:
  """Returns the encoder and the decoder of an array, or of a stack of them."""
  # like: shape and dtype that a payload is decoded to. has_rows: whether each
  # row is encoded for a worker, and what is received is summed; otherwise every
  # worker's payload is decoded. Arrays of one codec and shape are traced once.
  encode: Callable[..., Any] = codec.encode
  decode: Callable[..., Any] = functools.partial(codec.sum_decoded, like=like)
  if has_rows:
    encode = functools.partial(_layout.encode_rows, codec)
  else:
    decode = jax.vmap(functools.partial(codec.decode, like=like))
  if count > 1:
    encode = jax.vmap(encode, axis_size=count, out_axes=(int(has_rows), 0))
    decode = jax.vmap(decode, 1, axis_size=count)
  return core.trace_once(encode), core.trace_once(decode)


def gather_array(
  codec: Codec, x: Array, state: PyTree, key: core.Key | None, count: int = 1
) -> Rounds[tuple[Array, PyTree]]:
  """Gathers an array; returns every worker's, stacked, and the new state."""
  # count: number of arrays; several have an axis of arrays before all others.
  own = _layout.to_encode_dtype(codec, x)
  like = jax.ShapeDtypeStruct(own.shape[count > 1 :], own.dtype)
  encode, decode = _make_coders(codec, like, False, count)
  payload, state = encode(own, state, key)
  gathered = yield Message("gather", payload)
  return decode(gathered), state


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
  row: jax.ShapeDtypeStruct,
  state: PyTree,
  key: core.Key | None,
  kind: str,
  count: int = 1,
) -> Rounds[tuple[Array, PyTree, PyTree]]:
  """Sums a row over workers; returns the sum, its own payload, and states."""
  # row: shape and dtype that a row is decoded to. kind: "all_to_all", or
  # "scatter" for payloads that the network adds up. count: number of arrays;
  # several have an axis of arrays before all others.
  encode, decode = _make_coders(codec, row, True, count)
  payload, state = encode(rows, state, key)
  received = yield Message(kind, payload)
  if kind == "scatter":
    return codec.decode(received, row), payload, state
  return decode(received), payload, state


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
  likes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in rows]
  kinds = [
    choose_kind(leaf.codec, row)
    for leaf, row in zip(codecs, likes, strict=True)
  ]

  def average(i: int, x: Array, *rest: Any) -> Rounds[tuple[Array, PyTree]]:
    """Averages the rows of one array, or of several arrays like it."""
    state, key, count = rest
    own = _layout.to_encode_dtype(codecs[i].codec, x)
    total, _, state = yield from sum_rows(
      codecs[i].codec, own, likes[i], state, key, kinds[i], count
    )
    return total / workers, state

  own = core.to_varying(list(rows), axis_name)
  return _run_alike(average, own, codecs, states, kinds, axis_name, sending)


def _run_alike(
  make_rounds: Callable[..., Rounds[tuple[Array, PyTree]]],
  arrays: Sequence[Array],
  codecs: Sequence[LeafCodec],
  states: Sequence[PyTree],
  kinds: Sequence[str],
  axis_name: AxisName,
  sending: hosts.Sending,
  send: Mapping[str, Send] | None = None,
) -> tuple[list[Array], list[PyTree]]:
  """Runs the rounds of arrays that send one message each, equal ones as one."""
  # make_rounds: takes the position of an array, the array, its state and key,
  # and 1; or those of several arrays, stacked, and how many they are.
  # Payloads that the network can add up stay apart: to make one is an operation
  # or two.
  keys = [
    None if leaf.codec.summable else (leaf.codec, x.shape, x.dtype)
    for x, leaf in zip(arrays, codecs, strict=True)
  ]
  groups = _layout.group_alike(keys, [x.size for x in arrays], _MAX_ALIKE)
  rounds = []
  for group in groups:
    own = [(arrays[i], states[i], codecs[i].key) for i in group]
    rounds.append(make_rounds(group[0], *hosts.stack_apart(own), len(group)))
  own_kinds = [(kinds[group[0]],) for group in groups]
  results = run_rounds(rounds, own_kinds, axis_name, sending, send)
  apart: dict[int, tuple[Array, PyTree]] = {}
  for group, result in zip(groups, results, strict=True):
    likes = [(arrays[i], states[i]) for i in group]
    apart |= zip(group, hosts.unstack_apart(result, likes), strict=True)
  in_order = [apart[i] for i in range(len(arrays))]
  return [value for value, _ in in_order], [state for _, state in in_order]


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

  def gather_alike(i: int, *args: Any) -> Rounds[tuple[Array, PyTree]]:
    """Gathers one array, or several arrays like it."""
    return gather_array(codecs[i].codec, *args)

  states: list[PyTree] = [()] * len(shards)
  kinds = ["gather"] * len(shards)
  rows, _ = _run_alike(
    gather_alike,
    shards,
    codecs,
    states,
    kinds,
    axis_name,
    sending,
    {"gather": gather},
  )
  return rows
