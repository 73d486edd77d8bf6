"""Collectives of shards: arrays that send one message each, in one buffer."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jaxmotion import core, hosts
from jaxmotion.codecs import Codec, Message, identity
from jaxmotion.codecs.extend import Rounds, check_codec, fold_paths, partition
from jaxmotion.collectives import (
  _arguments,
  _layout,
  _rounds,
  _transport,
)
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike


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
  """Returns the codec of every leaf of a tree, which is encoded by itself."""
  # prefix: comes before a leaf's path in its key, so it is part of every random
  # bit.
  arrays = partition(identity() if codec is None else codec, tree)
  paths = [prefix + path for path, _ in arrays.leaves]
  keys = [None] * len(paths) if key is None else fold_paths(key, paths)
  found: dict[int, LeafCodec] = {}
  for group in arrays.leaf_groups:
    if len(group.leaves) > 1:
      raise ValueError(
        f"`{name}` must encode every leaf by itself, got one that joins some: "
        f"{codec!r}."
      )
    check_codec(name, group.codec, stateless=stateless, one_round=True)
    (leaf,) = group.leaves
    found[leaf] = LeafCodec(group.codec, keys[leaf])
  return [found[i] for i in range(len(arrays.leaves))]


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
  """Sums this worker's row over workers; returns the sum, the payload of this
  worker's own rows, and their new states."""
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
  """Returns this worker's row of the mean of every array, and new states."""
  # rows: (workers, ...) for each array, this worker's own. states: one for each
  # row, stacked.
  # Payloads that are small, or not summable, travel in one all-to-all. Means
  # are in float32 or wider, or in the array's own dtype from codecs that keep
  # it.
  workers = _arguments.count_workers(axis_name)
  kinds, rounds = [], []
  for x, leaf, state in zip(rows, codecs, states, strict=True):
    row = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    kind = choose_kind(leaf.codec, row)
    own = core.to_varying(x, axis_name)
    own = _layout.to_encode_dtype(leaf.codec, own)
    kinds.append((kind,))
    rounds.append(sum_rows(leaf.codec, own, row, state, leaf.key, kind))
  results = _rounds.run_rounds(rounds, kinds, axis_name, sending)
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
    for axis in (senders, devices) if devices else (senders,):
      payloads = _transport.gather_payloads(payloads, axis, sending)
      payloads = mark(payloads, axis)
    if not devices:
      return payloads
    # From (devices, hosts, ...) to (workers, ...), host by host.
    return jax.tree.map(
      lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), payloads
    )

  results = _rounds.run_rounds(
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
