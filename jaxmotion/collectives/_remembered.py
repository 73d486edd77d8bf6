"""Continues the state of an all-reduce in another layout on workers.

The state of `all_reduce` depends on the codec, the method and the number of
workers. What it stands for does not: for each part of a codec's memory, the
mean over workers. The second encoding of two phases has memory of the mean, of
which each worker keeps one row for all. It counts as part of every worker's.

`convert_states` reads the parts from one layout and writes them in another, so
that a state can be continued by other workers or by another codec.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import Division, Partition, partition
from jaxmotion.collectives import _codec_states, _layout
from jaxmotion.collectives._methods import ReduceState
from jaxmotion.core import Array, PyTree, ShapedLike


class StateLayout(NamedTuple):
  """Choices that determine how an all-reduce keeps its state.

  Attributes:
    codec: codec of the exchange; the first one of several levels.
    workers: number of workers, or of hosts if devices of a host reduce first.
    devices: devices of one host that reduce first, or None.
    canonical: whether codecs of several levels share the state.
  """

  codec: codecs.Codec
  workers: int
  method: str | None = None
  devices: int | None = None
  canonical: bool = False


def convert_states(
  states: PyTree,
  x: PyTree,
  source: StateLayout,
  target: StateLayout,
  *,
  op: str = "mean",
  reset_memory: bool = False,
) -> PyTree:
  """Returns states of another layout that remember the same."""
  # states: of `all_reduce` or `all_reduce_hierarchical`. Their leaves have a
  # leading axis of workers, and so do those of the result.
  core.check_arrays("states", states)
  core.check_arrays("x", x, numbers=False)
  core.check_instance("source", source, StateLayout, "a StateLayout")
  core.check_instance("target", target, StateLayout, "a StateLayout")
  core.check_choice("op", op, ("mean", "sum"))
  core.check_bool("reset_memory", reset_memory)
  groups = len(partition(source.codec, x).leaf_groups)
  if not isinstance(states, list | tuple) or len(states) != groups:
    raise ValueError(
      f"`states` must be a list with the state of each of {groups} arrays, got "
      f"{states!r:.200}."
    )
  memory = read_memory(states, x, source)
  new = write_memory(memory, x, target, op=op, reset_memory=reset_memory)
  return _keep_shared(new, states, x, source, target)


def _keep_shared(
  new: PyTree,
  old: PyTree,
  x: PyTree,
  source: StateLayout,
  target: StateLayout,
) -> PyTree:
  """Returns new states with the old `Shared` parts, which do not depend on
  workers."""

  def list_keys(layout: StateLayout) -> list[tuple[Any, ...]]:
    # Equal where the codec and its array are.
    arrays = partition(layout.codec, _shard_likes(x, layout.devices))
    likes = map(core.shape_string, arrays.array_likes())
    return [
      (*key, layout.devices)
      for key in zip(arrays.leaf_groups, likes, strict=True)
    ]

  known = dict(zip(list_keys(source), old, strict=True))
  kept = []
  for key, state in zip(list_keys(target), new, strict=True):
    parts = iter(core.shared_parts(known.get(key, state)))

    def refill(
      _: core.Shared, parts: Iterator[core.Shared] = parts
    ) -> core.Shared:
      return core.Shared(next(parts).value)

    kept.append(core.map_shared(lambda a: a, refill, state))
  return kept


def read_memory(
  states: PyTree, x: PyTree, layout: StateLayout
) -> dict[str, PyTree]:
  """Returns what workers remember: by name, trees of float32[workers, ...]."""
  # states: leaves have an axis of workers.
  # Leaves whose codec remembers no such part are zeros.
  devices = layout.devices
  if devices is None:
    return _read_arrays(states, x, layout)
  by_device = jax.tree.map(
    lambda a: a.reshape(len(a) // devices, devices, *a.shape[1:]), states
  )
  read = functools.partial(
    _read_arrays, x=_shard_likes(x, devices), layout=layout
  )
  found = jax.vmap(read, 1, axis_size=devices)(by_device)

  def join(like: ShapedLike, pieces: Array) -> Array:
    if not _layout.is_sharded(like, devices):
      # Each device has the whole array; all take what the first one receives.
      return pieces[0]
    workers = pieces.shape[1]
    flat = jnp.moveaxis(pieces, 0, 1).reshape(workers, -1)
    return flat[:, : math.prod(like.shape)].reshape(workers, *like.shape)

  return {name: jax.tree.map(join, x, tree) for name, tree in found.items()}


def write_memory(
  memory: Mapping[str, PyTree],
  x: PyTree,
  layout: StateLayout,
  *,
  op: str = "mean",
  reset_memory: bool = False,
) -> PyTree:
  """Returns states of all workers that remember these parts."""
  # memory: trees of float32[old workers, ...] by name.
  write = functools.partial(
    _write_arrays, layout=layout, op=op, reset_memory=reset_memory
  )
  devices = layout.devices
  if devices is None:
    return write(memory, x)

  def cut(like: ShapedLike, rows: Array) -> Array:
    """Returns every device's part: float32[devices, workers, ...]."""
    if not _layout.is_sharded(like, devices):
      return jnp.broadcast_to(rows, (devices, *rows.shape))
    return jax.vmap(lambda a: _layout.pad_to_rows(a, devices), out_axes=1)(rows)

  pieces = {name: jax.tree.map(cut, x, tree) for name, tree in memory.items()}
  write_device = functools.partial(write, x=_shard_likes(x, devices))
  states = jax.vmap(write_device, out_axes=1, axis_size=devices)(pieces)
  return jax.tree.map(
    lambda a: a.reshape(len(a) * devices, *a.shape[2:]), states
  )


def read_pending(states: PyTree, x: PyTree, layout: StateLayout) -> list[Array]:
  """Returns what is still to be sent, of whole arrays or of parts of them."""
  # states: of some workers; leaves have an axis of rows. x: arrays that one
  # device reduces.
  kept = _list_kept(partition(layout.codec, x), layout)
  return [
    found[part.name]
    for array, state in zip(kept, states, strict=True)
    for found in array.read(state)
    for part in array.codec.memory_parts
    if part.is_pending
  ]


def _shard_likes(x: PyTree, devices: int | None) -> PyTree:
  """Returns the arrays that are reduced, as one device has them."""
  if devices is None:
    return x
  return jax.tree.map(lambda a: _layout.shard_like(a, devices), x)


def _read_arrays(
  states: PyTree, x: PyTree, layout: StateLayout
) -> dict[str, PyTree]:
  arrays = partition(layout.codec, x)
  kept = _list_kept(arrays, layout)
  found = [
    array.read_whole(state) for array, state in zip(kept, states, strict=True)
  ]
  memory = {}
  for name in sorted(set().union(*found)):
    values = [
      parts[name]
      if name in parts
      else jnp.zeros((layout.workers, *array.like.shape), jnp.float32)
      for array, parts in zip(kept, found, strict=True)
    ]
    memory[name] = jax.vmap(arrays.merge)(values)
  return memory


def _write_arrays(
  memory: Mapping[str, PyTree],
  x: PyTree,
  layout: StateLayout,
  op: str,
  reset_memory: bool,
) -> PyTree:
  arrays = partition(layout.codec, x)
  joined = {name: _join_leaves(arrays, tree) for name, tree in memory.items()}
  states = []
  for i, array in enumerate(_list_kept(arrays, layout)):
    parts = _codec_states.resize_parts(
      array.codec,
      {name: values[i] for name, values in joined.items()},
      array.like.shape,
      layout.workers,
      op=op,
      reset_memory=reset_memory,
    )
    states.append(array.write(parts, layout.workers, layout.canonical))
  return states


def _join_leaves(arrays: Partition, tree: PyTree) -> list[Array]:
  """Returns the arrays of a tree whose leaves have an axis of workers."""
  leaves = arrays.treedef.flatten_up_to(tree)
  return [
    leaves[group.leaves[0]]
    if len(group.leaves) == 1
    else jnp.concatenate(
      [leaves[i].reshape(len(leaves[i]), -1) for i in group.leaves], axis=-1
    )
    for group in arrays.leaf_groups
  ]


class _KeptArray(NamedTuple):
  """One array of a reduction, and how workers keep the state of its codec.

  Attributes:
    part: what one worker encodes for all, or None if no worker does.
    division: how such parts are cut; None if they are rows of the array.
  """

  codec: codecs.Codec
  like: ShapedLike
  part: ShapedLike | None
  division: Division | None

  def read(self, state: ReduceState) -> list[dict[str, Array]]:
    """Returns the parts of the first state, and of the second if there is
    one."""
    read = functools.partial(_codec_states.read_states, self.codec)
    if self.part is None or not jax.tree.leaves(state.second):
      return [read(state.first, self.like)]
    if self.division is None:
      first = read(state.first, self.part, axes=2)
    else:
      first = read(state.first, self.like)
    return [first, read(state.second, self.part)]

  def read_whole(self, state: ReduceState) -> dict[str, Array]:
    """Returns each part of the memory: float32[workers, ...]."""
    own, *of_mean = self.read(state)
    if self.part is not None and self.division is None:
      own = jax.tree.map(jax.vmap(self._join), own)
    of_mean += [
      {part.row_of: own.pop(part.name)}
      for part in self.codec.memory_parts
      if part.row_of is not None
    ]
    for name, rows in itertools.chain(*(found.items() for found in of_mean)):
      own[name] = own[name] + self._join(rows)[None]
    return own

  def _join(self, rows: Array) -> Array:
    """Returns an array from the parts or rows of all workers."""
    if self.division is not None:
      return self.division.join_values(rows)
    flat = rows.reshape(-1)[: math.prod(self.like.shape)]
    return flat.reshape(self.like.shape)

  def write(
    self, parts: Mapping[str, Array], workers: int, canonical: bool
  ) -> ReduceState:
    """Returns states that remember parts, and nothing of the mean."""
    write = functools.partial(
      _codec_states.write_states, self.codec, canonical=canonical
    )
    if self.part is None:
      return ReduceState(write(parts, self.like, (workers,)), ())
    shape = workers, *self.part.shape
    nothing = {name: jnp.zeros(shape, jnp.float32) for name in parts}
    second = write(nothing, self.part, (workers,))
    if self.division is not None:
      return ReduceState(write(parts, self.like, (workers,)), second)
    cut = jax.vmap(lambda x: _layout.pad_to_rows(x, workers))
    rows = {name: cut(x) for name, x in parts.items()}
    return ReduceState(write(rows, self.part, (workers, workers)), second)


def _list_kept(arrays: Partition, layout: StateLayout) -> list[_KeptArray]:
  """Returns how workers keep the state of each array."""
  kept = []
  workers = layout.workers
  for group, like, method in zip(
    arrays.leaf_groups,
    arrays.array_likes(),
    _layout.choose_methods(arrays, workers, layout.method),
    strict=True,
  ):
    part = division = None
    if method == "two_phase":
      if not layout.canonical:
        division = _layout.find_division(group.codec, like, workers)
      part = division.like if division else _layout.row_like(like, workers)
    kept.append(_KeptArray(group.codec, like, part, division))
  return kept
