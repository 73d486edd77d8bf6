"""Error memory of an all-reduce, whatever its layout on workers.

The state of `all_reduce` depends on the codec, the method and the number of
workers. What it stands for does not. One part is every worker's own error,
which it adds to the next value that it sends. The other part is the errors of
the second encoding of two phases, each of which one worker keeps for all. In
units of the mean,

  still to be sent = mean over workers of `own` + `shared`.

`convert_states` reads it from one layout and writes it in another, so that a
state can be continued by other workers or by another codec.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import (
  Division,
  LeafGroup,
  Partition,
  check_codec,
  partition,
)
from jaxmotion.collectives import _codec_memory, _layout, _rows
from jaxmotion.collectives._methods import ReduceState
from jaxmotion.core import Array, PyTree, ShapedLike


class Memory(NamedTuple):
  """Errors that an all-reduce has still to send.

  Attributes:
    own: tree of float32[workers, ...], the errors that each worker keeps.
    shared: tree of float32[...], errors of the mean.
  """

  own: PyTree
  shared: PyTree


class StateLayout(NamedTuple):
  """Choices that determine how an all-reduce keeps its state.

  Attributes:
    codec: codec of the exchange; the first one of several levels.
    workers: number of workers, or of hosts if devices of a host reduce first.
    method: "gather", "two_phase" or None, as given to the collective.
    devices: devices of one host that reduce first, or None.
    canonical: whether codecs of several levels share the state.
  """

  codec: codecs.Codec
  workers: int
  method: str | None = None
  devices: int | None = None
  canonical: bool = False


def list_remembered(
  x: PyTree, codec: codecs.Codec
) -> dict[str, tuple[str, ...]]:
  """Returns what a codec remembers of each leaf, by the path of the leaf.

  Args:
    x: pytree of arrays or ShapeDtypeStructs that are reduced.
    codec: codec of the reduction.

  Raises:
    ValueError: a codec keeps a state that is none of the known parts.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.rules([
    ...   ("b", codecs.identity()), (".", codecs.feedback(codecs.sign()))
    ... ])
    >>> list_remembered({"b": jnp.zeros(3), "w": jnp.zeros(3)}, codec)
    {'b': (), 'w': ('error',)}
  """
  core.check_arrays("x", x, numbers=False)
  check_codec("codec", codec, trees=True)
  arrays = partition(codec, x)
  found = {
    arrays.leaves[i][0]: _codec_memory.list_parts(group.codec)
    for group in arrays.leaf_groups
    for i in group.leaves
  }
  return dict(sorted(found.items()))


def convert_states(
  states: PyTree,
  x: PyTree,
  source: StateLayout,
  target: StateLayout,
  *,
  op: str = "mean",
  reset_memory: bool = False,
) -> PyTree:
  """Returns states of another layout that remember the same errors.

  Args:
    states: state of `all_reduce`, or of `all_reduce_hierarchical`, whose leaves
      have a leading axis of workers.
    x: pytree of arrays or ShapeDtypeStructs that are reduced.
    source: how the states were made.
    target: how the states shall be kept.
    op: "mean" or "sum", as given to the collective.
    reset_memory: whether to forget the errors.

  Returns:
    State that the collective continues from; leaves have a leading axis of
    workers.

  Raises:
    ValueError: a codec keeps a state other than error memory.

  Example:
    >>> from jaxmotion import codecs
    >>> codec, x = codecs.feedback(codecs.sign()), jnp.zeros(2)
    >>> one, two = StateLayout(codec, 1), StateLayout(codec, 2)
    >>> state = jax.tree.map(lambda a: a[None], codec.init(x))
    >>> found = convert_states([ReduceState(state, ())], x, one, two)
    >>> found[0].first.memory.value.shape
    (2, 2)
  """
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
  own = core.drop_shared(states)
  memories = {
    part: read_memory(own, x, source, part) for part in _codec_memory.PARTS
  }
  if reset_memory:
    memories["error"] = jax.tree.map(jnp.zeros_like, memories["error"])
  for part, memory in memories.items():
    # What was sent is a mean whatever is made of the result.
    kind = "mean" if part == "sent" else op
    memories[part] = _resize_memory(memory, target.workers, kind)
  new = write_memory(memories, x, target)
  return _restore_shared(new, states, x, source, target)


def _restore_shared(
  new: PyTree,
  old: PyTree,
  x: PyTree,
  source: StateLayout,
  target: StateLayout,
) -> PyTree:
  """Returns states with their `Shared` parts, which do not depend on
  workers."""
  # They are the old ones where the codec and its array are the same, and fresh
  # ones elsewhere.
  known = {}
  for (group, like), state in zip(_find_groups(x, source), old, strict=True):
    known[group.leaves, group.codec, like.shape, source.devices] = state
  restored = []
  for (group, like), state in zip(_find_groups(x, target), new, strict=True):
    own = known.get((group.leaves, group.codec, like.shape, target.devices))
    rows = target.devices or 1
    if own is None:
      own = jax.tree.map(
        lambda a, rows=rows: jnp.broadcast_to(a, (rows, *a.shape)),
        group.codec.init(like),
      )
      if isinstance(group.codec, codecs.ef21):
        # The mean is that of what workers have sent, whatever the codec.
        sent = state.first.own
        means = sent.reshape(-1, rows, *sent.shape[1:]).mean(0)
        own = own._replace(mean=core.Shared(means))
    parts = iter([part.value for part in core.shared_parts(own)])

    def refill(_: core.Shared, parts: Iterator[PyTree] = parts) -> core.Shared:
      return core.Shared(next(parts))

    restored.append(core.map_shared(lambda a: a, refill, state))
  return restored


def _find_groups(
  x: PyTree, layout: StateLayout
) -> list[tuple[LeafGroup, jax.ShapeDtypeStruct]]:
  """Returns the arrays that are reduced, as one device has them."""
  devices = layout.devices
  if devices is not None:
    x = jax.tree.map(lambda a: _layout.shard_like(a, devices), x)
  arrays = partition(layout.codec, x)
  return list(zip(arrays.leaf_groups, arrays.array_likes(), strict=True))


def read_memory(
  states: PyTree, x: PyTree, layout: StateLayout, part: str = "error"
) -> Memory:
  """Returns a part of what all workers remember; zeros where they do not.

  Args:
    states: state of a reduction, whose leaves have an axis of workers.
    x: pytree of arrays or ShapeDtypeStructs that are reduced.
    layout: how the states were made.
    part: one of `PARTS`.
  """
  if layout.devices is None:
    return _read_arrays(states, x, layout, part)
  devices = layout.devices
  by_device = jax.tree.map(
    lambda a: a.reshape(layout.workers, devices, *a.shape[1:]), states
  )
  shards = jax.tree.map(lambda a: _layout.shard_like(a, devices), x)
  found = [
    _read_arrays(
      jax.tree.map(lambda a, d=d: a[:, d], by_device), shards, layout, part
    )
    for d in range(devices)
  ]

  def join(like: ShapedLike, *pieces: Array, rows: int) -> Array:
    if not _layout.is_sharded(like, devices):
      # Each device has the whole array; all take what the first one receives.
      return pieces[0]
    lead = pieces[0].shape[:rows]
    flat = jnp.concatenate([a.reshape(*lead, -1) for a in pieces], axis=-1)
    return flat[..., : math.prod(like.shape)].reshape(*lead, *like.shape)

  own = jax.tree.map(
    lambda a, *pieces: join(a, *pieces, rows=1), x, *(f.own for f in found)
  )
  shared = jax.tree.map(
    lambda a, *pieces: join(a, *pieces, rows=0), x, *(f.shared for f in found)
  )
  return Memory(own, shared)


def write_memory(
  memories: Mapping[str, Memory], x: PyTree, layout: StateLayout
) -> PyTree:
  """Returns states of all workers that remember these parts.

  Args:
    memories: parts by name, whose own ones have an axis of the layout's
      workers; those that are left out are zeros.
    x: pytree of arrays or ShapeDtypeStructs that are reduced.
    layout: how the states shall be kept.
  """
  if layout.devices is None:
    return _write_arrays(memories, x, layout)
  devices = layout.devices
  shards = jax.tree.map(lambda a: _layout.shard_like(a, devices), x)

  def cut(like: ShapedLike, error: Array) -> Array:
    """Returns every device's part: float32[devices, ...]."""
    if not _layout.is_sharded(like, devices):
      return jnp.broadcast_to(error, (devices, *error.shape))
    return _rows.pad_to_rows(error, devices)

  def cut_memory(memory: Memory) -> Memory:
    own = jax.tree.map(
      lambda a, e: jax.vmap(lambda v: cut(a, v))(e), x, memory.own
    )
    return Memory(own, jax.tree.map(cut, x, memory.shared))

  pieces = {part: cut_memory(memory) for part, memory in memories.items()}

  def select(memory: Memory, d: int) -> Memory:
    own = jax.tree.map(lambda a: a[:, d], memory.own)
    return Memory(own, jax.tree.map(lambda a: a[d], memory.shared))

  parts = [
    _write_arrays(
      {part: select(m, d) for part, m in pieces.items()}, shards, layout
    )
    for d in range(devices)
  ]

  def stack(*leaves: Array) -> Array:
    both = jnp.stack(leaves, axis=1)
    return both.reshape(-1, *both.shape[2:])

  return jax.tree.map(stack, *parts)


def _resize_memory(memory: Memory, workers: int, op: str) -> Memory:
  """Returns the same errors on another number of workers."""
  # New worker j takes over the old workers whose share of [0, 1) overlaps its
  # own: two old workers are averaged, or one is copied, where one number
  # divides the other. What is still to be sent stays the same.
  leaves = jax.tree.leaves(memory.own)
  if not leaves or leaves[0].shape[0] == workers:
    return memory
  scale = leaves[0].shape[0] / workers if op == "sum" else 1.0
  return Memory(
    jax.tree.map(lambda e: mix_rows(e, workers) * scale, memory.own),
    jax.tree.map(lambda e: e * scale, memory.shared),
  )


def mix_rows(rows: Array, count: int) -> Array:
  """Returns rows of new workers, averages of the old rows they take over.

  Args:
    rows: floating-point [old workers, ...].
    count: number of new workers.

  Example:
    >>> mix_rows(jnp.array([[0.0], [2.0], [4.0]]), 2).tolist()
    [[0.6666666865348816], [3.3333334922790527]]
  """
  core.check_float("rows", rows)
  if not jnp.ndim(rows):
    raise ValueError(f"`rows` must have an axis of workers, got {rows!r}.")
  core.check_int("count", count, 1, 2**31 - 1)
  if rows.shape[0] == count:
    return rows
  return jnp.stack([_mix_row(rows, new, count) for new in range(count)])


def _mix_row(rows: Array, new: int, count: int) -> Array:
  """Returns the average of old rows that one of the new workers takes over."""
  old = rows.shape[0]
  terms = []
  for r in range(old):
    # In units of 1 / (old * count), so that shares are exact.
    share = min((new + 1) * old, (r + 1) * count) - max(new * old, r * count)
    if share > 0:
      terms.append(rows[r] * (share / old))
  while len(terms) > 1:  # In pairs: a mean of 2^n copies has no rounding.
    pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
    terms = pairs + terms[2 * len(pairs) :]
  return terms[0]


def _read_arrays(
  states: PyTree, x: PyTree, layout: StateLayout, part: str
) -> Memory:
  arrays = partition(layout.codec, x)
  workers = layout.workers
  own, shared = [], []
  for group, like, method, state in zip(
    arrays.leaf_groups,
    arrays.array_likes(),
    _layout.choose_methods(arrays, workers, layout.method),
    states,
    strict=True,
  ):
    shape, size = like.shape, math.prod(like.shape)
    codec = group.codec
    means = jnp.zeros(shape, jnp.float32)

    def read(state: PyTree, codec: codecs.Codec = codec) -> Array:
      return _codec_memory.read_parts(codec, state)[part]

    if part not in _codec_memory.list_parts(codec):
      values = jnp.zeros((workers, *shape), jnp.float32)
    elif isinstance(codec, codecs.onebit):
      values, means = _codec_memory.read_onebit(state.first, shape)
    elif method == "two_phase" and (
      division := _find_division(codec, like, layout)
    ):
      values = jax.vmap(read)(state.first)
      means = division.join_values(jax.vmap(read)(state.second))
    elif method == "two_phase":
      rows = jax.vmap(jax.vmap(read))(state.first)
      values = rows.reshape(workers, -1)[:, :size].reshape(workers, *shape)
      means = jax.vmap(read)(state.second).reshape(-1)[:size].reshape(shape)
    else:
      values = jax.vmap(read)(state.first)
    own.append(values)
    shared.append(means)
  merge_rows = jax.vmap(arrays.merge) if own else arrays.merge
  return Memory(merge_rows(own), arrays.merge(shared))


def _write_arrays(
  memories: Mapping[str, Memory], x: PyTree, layout: StateLayout
) -> PyTree:
  arrays = partition(layout.codec, x)
  workers = layout.workers
  keep = functools.partial(
    _codec_memory.make_states, canonical=layout.canonical
  )
  joined = {
    part: (
      _join_leaves(arrays, memory.own, (workers,)),
      _join_leaves(arrays, memory.shared, ()),
    )
    for part, memory in memories.items()
  }
  states = []
  for i, (group, like, method) in enumerate(
    zip(
      arrays.leaf_groups,
      arrays.array_likes(),
      _layout.choose_methods(arrays, workers, layout.method),
      strict=True,
    )
  ):
    codec = group.codec
    own, means = (
      {part: joined[part][side][i] for part in _codec_memory.list_parts(codec)}
      for side in (0, 1)
    )
    if not own:
      states.append(ReduceState(core.drop_shared(codec.init(like)), ()))
    elif isinstance(codec, codecs.onebit):
      state = _codec_memory.make_onebit(codec, own["error"], means["error"])
      states.append(ReduceState(state, ()))
    elif method == "two_phase" and (
      division := _find_division(codec, like, layout)
    ):
      of_mean = jax.tree.map(division.divide_values, means)
      states.append(ReduceState(keep(codec, own, 1), keep(codec, of_mean, 1)))
    elif method == "two_phase":
      rows = jax.tree.map(
        jax.vmap(lambda e: _rows.pad_to_rows(e, workers)), own
      )
      of_mean = jax.tree.map(lambda e: _rows.pad_to_rows(e, workers), means)
      states.append(ReduceState(keep(codec, rows, 2), keep(codec, of_mean, 1)))
    else:
      both = jax.tree.map(lambda e, mean: e + mean[None], own, means)
      states.append(ReduceState(keep(codec, both, 1), ()))
  return states


def _find_division(
  codec: codecs.Codec, like: ShapedLike, layout: StateLayout
) -> Division | None:
  """Returns how two phases divide payloads of an array, or None for rows."""
  if layout.canonical:
    return None
  wide = jax.ShapeDtypeStruct(like.shape, jnp.float32)
  return _layout.find_division(codec, wide, layout.workers)


def _join_leaves(
  arrays: Partition, tree: PyTree, lead: tuple[int, ...]
) -> list[Array]:
  """Returns the arrays of a tree whose leaves have leading axes."""
  leaves = arrays.treedef.flatten_up_to(tree)
  return [
    leaves[group.leaves[0]]
    if len(group.leaves) == 1
    else jnp.concatenate(
      [leaves[i].reshape(*lead, -1) for i in group.leaves], axis=-1
    )
    for group in arrays.leaf_groups
  ]
