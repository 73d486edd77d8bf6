"""Shards of many arrays, reduced and gathered through codecs in one buffer."""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxmotion import core, hosts
from jaxmotion.codecs import Codec, identity
from jaxmotion.codecs.extend import check_codec, fold_paths, partition
from jaxmotion.collectives import _arguments, _layout, _transport
from jaxmotion.core import Array, AxisName, PyTree


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
  keys: list[core.Key | None] = [None] * len(paths)
  if key is not None:
    keys = [*fold_paths(key, paths)]
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
  coded = [
    _layout.encode_rows(
      leaf.codec,
      _layout.to_encode_dtype(leaf.codec, core.to_varying(x, axis_name)),
      state,
      leaf.key,
    )
    for x, leaf, state in zip(rows, codecs, states, strict=True)
  ]
  means = average_rows(
    [payload for payload, _ in coded],
    codecs,
    [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in rows],
    axis_name,
    sending,
  )
  return means, [state for _, state in coded]


def average_rows(
  payloads: Sequence[PyTree],
  codecs: Sequence[LeafCodec],
  likes: Sequence[jax.ShapeDtypeStruct],
  axis_name: AxisName,
  sending: hosts.Sending = hosts.AT_ONCE,
) -> list[Array]:
  """Returns this worker's row of the mean of every array, from payloads."""
  workers = _arguments.count_workers(axis_name)
  # A collective for each small array would cost round trips: they join the
  # all-to-all, which has as many bytes. The choice depends on the array alone,
  # since it decides the order of the sum.
  is_alone = [
    _layout.is_summed(leaf.codec, row)
    and row.size >= _transport.MIN_ELEMENTS_ALONE
    for leaf, row in zip(codecs, likes, strict=True)
  ]
  sent = [p for p, alone in zip(payloads, is_alone, strict=True) if not alone]
  received = iter(_transport.exchange_rows(sent, axis_name, sending))
  means = []
  for payload, leaf, row, alone in zip(
    payloads, codecs, likes, is_alone, strict=True
  ):
    if alone:
      total = leaf.codec.decode(
        _transport.scatter_payload(payload, axis_name), row
      )
    else:
      total = leaf.codec.sum_decoded(next(received), row)
    means.append(total / workers)
  return means


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
  hosts, devices = (
    _arguments.count_workers(axes.hosts),
    _arguments.count_workers(axes.devices),
  )
  by_device = [
    a.reshape(hosts, devices, *a.shape[1:]).swapaxes(0, 1) for a in rows
  ]
  states: list[PyTree] = [()] * len(rows)
  means, _ = scatter_means(by_device, codecs, states, axes.devices, sending)
  return core.to_varying(means, axes)


def join_hosts(gathered: PyTree) -> PyTree:
  """Returns leaves (workers, ...), host by host, of ones (devices, hosts,
  ...)."""
  return jax.tree.map(
    lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), gathered
  )


def gather_shards(
  shards: Sequence[Array],
  codecs: Sequence[LeafCodec],
  axis_name: AxisName,
  sending: hosts.Sending = hosts.AT_ONCE,
) -> list[Array]:
  """Returns all shards of every array, host by host: (workers, ...)."""
  # All payloads travel in one buffer. With `HostAxes` they travel between hosts
  # first, so that each payload crosses to another host once. The devices of a
  # host then forward the words.
  # All workers decode the same words, so the result has the same bits
  # everywhere and is typed as replicated.
  own = [
    _layout.to_encode_dtype(leaf.codec, x)
    for x, leaf in zip(shards, codecs, strict=True)
  ]
  payloads = [
    leaf.codec.encode(x, (), leaf.key)[0]
    for x, leaf in zip(own, codecs, strict=True)
  ]
  senders, devices = core.split_axes(axis_name)
  gathered = _transport.gather_payloads(payloads, senders, sending)
  if devices:
    gathered = join_hosts(
      _transport.gather_payloads(gathered, devices, sending)
    )
  return [
    jax.vmap(lambda p, leaf=leaf, x=x: leaf.codec.decode(p, x))(payload)
    for payload, leaf, x in zip(gathered, codecs, own, strict=True)
  ]
