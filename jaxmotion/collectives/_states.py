"""State of an all-reduce: how it is made, read, and continued elsewhere.

The state depends on the codec, the method and the number of workers. What it
stands for does not: for each part of a codec's memory, the mean over workers.
The second encoding of two phases has memory of the mean, of which each worker
keeps one row for all. It counts as part of every worker's.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import Partition, partition
from jaxmotion.collectives import _layout
from jaxmotion.core import Array, PyTree, ShapedLike


class ReduceState(NamedTuple):
  """Codec state of the reduction of one array."""

  # Of this worker's own elements; stacked where rows are encoded. A bundle of
  # several stacks has a tuple of them.
  first: PyTree
  second: PyTree  # Of the mean of a part; `()` unless "two_phase".


def init_rows(codec: codecs.Codec, rows: int, like: ShapedLike) -> PyTree:
  """Returns a fresh codec state for each of several rows, stacked."""
  # like: shape and dtype of one row.
  return _repeat(codec.init(like), rows)


def _repeat(state: PyTree, count: int) -> PyTree:
  """Returns several of one state, stacked."""
  return jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), state)


def init_state(plan: _layout.ArrayPlan) -> ReduceState:
  """Returns the fresh state of an array that is reduced as planned."""
  codec = plan.codec
  if plan.method == "rounds":
    return ReduceState(codec.init_rounds(plan.like, plan.workers), ())
  if plan.encodes_rows:
    first = init_rows(codec, plan.workers, plan.part)
  else:
    first = codec.init(plan.like)
  second = codec.init(plan.part) if plan.method == "two_phase" else ()
  return ReduceState(first, second)


def init_states(plans: Sequence[_layout.ArrayPlan]) -> list[ReduceState]:
  """Returns the fresh state of each bundle of arrays."""
  states = []
  for bundle in _layout.find_bundles(plans):
    own = []
    for i, *others in bundle.stacks:
      state = init_state(plans[i])
      own.append(_repeat(state, 1 + len(others)) if others else state)
    second = own[0].second
    if bundle.division is not None:
      codec = plans[bundle.stacks[0][0]].codec
      second = codec.init(bundle.division.like)
    states.append(join_firsts([state.first for state in own], second))
  return states


def join_firsts(firsts: Sequence[PyTree], second: PyTree) -> ReduceState:
  """Returns the state of a bundle, from the first state of each stack."""
  return ReduceState(tuple(firsts) if len(firsts) > 1 else firsts[0], second)


def split_firsts(
  bundle: _layout.Bundle, state: ReduceState
) -> Sequence[PyTree]:
  """Returns the first state of each stack of a bundle."""
  return state.first if len(bundle.stacks) > 1 else (state.first,)


def is_stacked(states: PyTree, canonical: bool) -> bool:
  """Says whether an all-reduce keeps a state for each stack of arrays."""
  # canonical: whether codecs of several levels share the state; each of them
  # may group the arrays otherwise.
  return not canonical and bool(jax.tree.leaves(states))


def stack_states(
  plans: Sequence[_layout.ArrayPlan], states: PyTree, axis: int = 0
) -> list[ReduceState]:
  """Returns the state of each bundle, from those of its arrays."""
  # axis: where leaves get the axis of arrays, behind one of workers if any.
  stack_all = lambda *a: jnp.stack(a, axis)

  def stack(trees: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(stack_all, *trees) if len(trees) > 1 else trees[0]

  def join(*seconds: Array) -> Array:
    if seconds[0].ndim > axis:
      return jnp.concatenate(seconds, axis + 1)
    return functools.reduce(lax.max, seconds)  # Counts, which are equal.

  stacked = []
  for bundle in _layout.find_bundles(plans):
    seconds = [states[i].second for own in bundle.stacks for i in own]
    if bundle.division is None:
      second = stack(seconds)
    else:
      second = bundle.division.map_blocks(join, *seconds, lead=axis)
    firsts = [stack([states[i].first for i in own]) for own in bundle.stacks]
    stacked.append(join_firsts(firsts, second))
  return stacked


def unstack_states(
  plans: Sequence[_layout.ArrayPlan], states: PyTree, axis: int = 0
) -> list[ReduceState]:
  """Returns the state of each array: inverts `stack_states`."""
  apart: dict[int, ReduceState] = {}
  for bundle, state in zip(_layout.find_bundles(plans), states, strict=True):
    firsts = split_firsts(bundle, state)
    start = 0
    for own, first in zip(bundle.stacks, firsts, strict=True):
      for place, i in enumerate(own):
        pick = functools.partial(_pick, len(own), place, axis)
        if bundle.division is None:
          second = pick(state.second)
        else:
          blocks = plans[i].part.shape[1]
          cut = functools.partial(_cut_blocks, start, blocks, axis)
          second = bundle.division.map_blocks(cut, state.second, lead=axis)
          start += blocks
        apart[i] = ReduceState(pick(first), second)
  return [apart[i] for i in range(len(plans))]


def _pick(count: int, place: int, axis: int, stacked: PyTree) -> PyTree:
  """Returns the state of one array of a stack; of a lone array as it is."""
  take = lambda a: lax.index_in_dim(a, place, axis, keepdims=False)
  return jax.tree.map(take, stacked) if count > 1 else stacked


def _cut_blocks(start: int, blocks: int, axis: int, joined: Array) -> Array:
  """Returns some of the blocks of a leaf; a count as it is."""
  if joined.ndim == axis:
    return joined
  return lax.slice_in_dim(joined, start, start + blocks, axis=axis + 1)


def canonical_state(plan: _layout.ArrayPlan, state: ReduceState) -> ReduceState:
  """Returns the state of an array in the form that codecs of levels share."""
  convert = plan.codec.canonical_state
  if not jax.tree.leaves(state.second):
    return ReduceState(convert(state.first), ())
  convert_first = jax.vmap(convert) if plan.encodes_rows else convert
  return ReduceState(convert_first(state.first), convert(state.second))


class StateLayout(NamedTuple):
  """Choices that determine how an all-reduce keeps its state."""

  codec: codecs.Codec  # Of the exchange; the first one of several levels.
  workers: int  # Or hosts, if devices of a host reduce first.
  method: str | None = None
  devices: int | None = None  # Of one host that reduce first, or None.
  canonical: bool = False  # Whether codecs of several levels share the state.


def convert_states(
  states: PyTree,
  x: PyTree,
  source: StateLayout,
  target: StateLayout,
  *,
  op: str = "mean",
  reset_memory: bool = False,
  living: Sequence[int] | None = None,
) -> PyTree:
  """Returns states of another layout that remember the same, for `resize`."""
  # states: of `all_reduce`. Their leaves have a leading axis of workers, and so
  # do those of the result. living: workers whose memory is kept; None: all.
  memory = read_memory(states, x, source)
  if living is not None:
    memory = jax.tree.map(lambda rows: rows[np.asarray(living)], memory)
  new = write_memory(memory, x, target, op=op, reset_memory=reset_memory)
  before, after = (
    _plan_kept(partition(a.codec, _shard_likes(x, a.devices)), a)
    for a in (source, target)
  )
  states = _convert_kept(unstack_states, before, states, source)
  new = _convert_kept(unstack_states, after, new, target)

  def list_keys(layout: StateLayout) -> list[tuple[Any, ...]]:
    """Returns a key of each array, equal where its codec and shape are."""
    # `devices` is part of it, as the shards of another number differ.
    arrays = partition(layout.codec, _shard_likes(x, layout.devices))
    likes = map(core.shape_string, arrays.array_likes())
    return [
      (*key, layout.devices)
      for key in zip(arrays.leaf_groups, likes, strict=True)
    ]

  # `Shared` parts do not depend on workers: the old ones are converted.
  known = dict(zip(list_keys(source), states, strict=True))
  converted = []
  for key, state in zip(list_keys(target), new, strict=True):
    parts = iter(core.shared_parts(known.get(key, state)))
    refill = lambda _, parts=parts: core.Shared(next(parts).value)
    converted.append(core.map_shared(refill, state))
  return _convert_kept(stack_states, after, converted, target)


def read_memory(
  states: PyTree, x: PyTree, layout: StateLayout
) -> dict[str, PyTree]:
  """Returns what workers remember: by name, trees of float32[workers, ...]."""
  # states: leaves have an axis of workers.
  # Leaves whose codec remembers no such part are zeros.
  if layout.devices is not None:
    return _read_devices(states, x, layout, layout.devices)
  arrays = partition(layout.codec, x)
  plans = _plan_kept(arrays, layout)
  states = _convert_kept(unstack_states, plans, states, layout)
  per_array = list(map(_read_whole, plans, states))
  memory = {}
  for name in sorted(set().union(*per_array)):
    values = [
      parts[name]
      if name in parts
      else jnp.zeros((layout.workers, *plan.like.shape), jnp.float32)
      for plan, parts in zip(plans, per_array, strict=True)
    ]
    memory[name] = jax.vmap(arrays.merge)(values)
  return memory


def _read_devices(
  states: PyTree, x: PyTree, layout: StateLayout, devices: int
) -> dict[str, PyTree]:
  """Returns what workers remember whose devices reduce a shard each."""
  by_device = jax.tree.map(
    lambda a: a.reshape(len(a) // devices, devices, *a.shape[1:]), states
  )
  shards, layout = _shard_likes(x, devices), layout._replace(devices=None)
  read = lambda states: read_memory(states, shards, layout)
  memory = jax.vmap(read, 1, axis_size=devices)(by_device)

  def join(like: ShapedLike, pieces: Array) -> Array:
    if not _layout.is_sharded(like, devices):
      # Each device has the whole array; all take what the first one receives.
      return pieces[0]
    return jax.vmap(lambda a: _layout.join_flat(a, like.shape), 1)(pieces)

  return {name: jax.tree.map(join, x, tree) for name, tree in memory.items()}


def write_memory(
  memory: Mapping[str, PyTree], x: PyTree, layout: StateLayout, **options: Any
) -> PyTree:
  """Returns states of all workers that remember these parts."""
  # memory: trees of float32[old workers, ...] by name. options: of
  # `resize_parts`.
  if layout.devices is not None:
    return _write_devices(memory, x, layout, layout.devices, options)
  arrays = partition(layout.codec, x)
  split = jax.vmap(arrays.split)
  joined = {name: split(tree) for name, tree in memory.items()}
  plans, states = _plan_kept(arrays, layout), []
  for i, plan in enumerate(plans):
    parts = {name: values[i] for name, values in joined.items()}
    parts = resize_parts(
      plan.codec, parts, plan.like.shape, plan.workers, **options
    )
    states.append(_write_array(plan, parts, layout.canonical))
  return _convert_kept(stack_states, plans, states, layout)


def _write_devices(
  memory: Mapping[str, PyTree],
  x: PyTree,
  layout: StateLayout,
  devices: int,
  options: dict[str, Any],
) -> PyTree:
  """Returns states of all workers whose devices reduce a shard each."""

  def cut(like: ShapedLike, rows: Array) -> Array:
    """Returns every device's part: float32[devices, workers, ...]."""
    if not _layout.is_sharded(like, devices):
      return jnp.broadcast_to(rows, (devices, *rows.shape))
    return jax.vmap(lambda a: _layout.pad_to_rows(a, devices), out_axes=1)(rows)

  pieces = {name: jax.tree.map(cut, x, tree) for name, tree in memory.items()}
  shards, layout = _shard_likes(x, devices), layout._replace(devices=None)
  write = lambda memory: write_memory(memory, shards, layout, **options)
  states = jax.vmap(write, out_axes=1, axis_size=devices)(pieces)
  return jax.tree.map(
    lambda a: a.reshape(len(a) * devices, *a.shape[2:]), states
  )


def read_pending(states: PyTree, x: PyTree, layout: StateLayout) -> list[Array]:
  """Returns what is still to be sent, of whole arrays or of parts of them."""
  # states: of some workers; leaves have an axis of rows. x: arrays that one
  # device reduces.
  plans = _plan_kept(partition(layout.codec, x), layout)
  states = _convert_kept(unstack_states, plans, states, layout)
  return [
    found[part.name]
    for plan, state in zip(plans, states, strict=True)
    for found in _read_array(plan, state)
    for part in plan.codec.memory_parts
    if part.is_pending
  ]


def _shard_likes(x: PyTree, devices: int | None) -> PyTree:
  """Returns the arrays that are reduced, as one device has them."""
  if devices is None:
    return x
  return jax.tree.map(lambda a: _layout.shard_like(a, devices), x)


def _plan_kept(
  arrays: Partition, layout: StateLayout
) -> list[_layout.ArrayPlan]:
  """Returns how each array is reduced, by which its state is laid out."""
  return _layout.plan_arrays(
    arrays, layout.workers, layout.method, needs_rows=layout.canonical
  )


def _convert_kept(
  convert: Callable[..., list[ReduceState]],
  plans: Sequence[_layout.ArrayPlan],
  states: PyTree,
  layout: StateLayout,
) -> list[ReduceState]:
  """Stacks or unstacks all workers' states, where an all-reduce stacks them."""
  # convert: `stack_states` or `unstack_states`.
  is_kept = is_stacked(states, layout.canonical)
  return convert(plans, states, 1) if is_kept else states


def _read_array(
  plan: _layout.ArrayPlan, state: ReduceState
) -> list[dict[str, Array]]:
  """Returns what the first state of an array remembers, then the second one."""
  read = functools.partial(read_states, plan.codec)
  if plan.encodes_rows:
    parts = [read(state.first, plan.part, axes=2)]
  else:
    parts = [read(state.first, plan.like)]
  if plan.method == "two_phase":
    parts.append(read(state.second, plan.part))
  return parts


def _read_whole(
  plan: _layout.ArrayPlan, state: ReduceState
) -> dict[str, Array]:
  """Returns each worker's memory of a whole array: float32[workers, ...]."""
  # What each worker remembers of a row of the mean is added to every own one.

  def join(rows: Array) -> Array:
    if plan.division is not None:
      return plan.division.join_values(rows)
    return _layout.join_flat(rows, plan.like.shape)

  own, *of_mean = _read_array(plan, state)
  if plan.encodes_rows:
    own = jax.tree.map(jax.vmap(join), own)
  of_mean += [
    {part.row_of: own.pop(part.name)}
    for part in plan.codec.memory_parts
    if part.row_of is not None
  ]
  for name, rows in itertools.chain(*(found.items() for found in of_mean)):
    own[name] = own[name] + join(rows)[None]
  return own


def _write_array(
  plan: _layout.ArrayPlan, parts: Mapping[str, Array], canonical: bool
) -> ReduceState:
  """Makes states that remember these parts of an array: `_read_whole` back."""
  workers, like = plan.workers, plan.like
  write = functools.partial(write_states, plan.codec, canonical=canonical)
  second: PyTree = ()
  if plan.method == "two_phase":
    shape = workers, *plan.part.shape
    nothing = {name: jnp.zeros(shape, jnp.float32) for name in parts}
    second = write(nothing, plan.part, (workers,))
  if not plan.encodes_rows:
    return ReduceState(write(parts, like, (workers,)), second)
  cut = jax.vmap(lambda x: _layout.pad_to_rows(x, workers))
  rows = {name: cut(x) for name, x in parts.items()}
  return ReduceState(write(rows, plan.part, (workers, workers)), second)


def read_states(
  codec: codecs.Codec, states: PyTree, like: ShapedLike, axes: int = 1
) -> dict[str, Array]:
  """Returns what a codec remembers, of states that are stacked."""
  # axes: number of leading axes: of workers, and of rows that each encodes.
  read: Callable[[PyTree], dict[str, Array]]
  read = lambda state: codec.read_memory(state, like)
  if not codec.memory_parts:
    return read(states)
  for _ in range(axes):
    read = jax.vmap(read)
  # `Shared` parts have no axis of workers.
  return read(core.drop_shared(states))


def write_states(
  codec: codecs.Codec,
  parts: Mapping[str, Array],
  like: ShapedLike,
  lead: tuple[int, ...],
  *,
  canonical: bool = False,
) -> PyTree:
  """Returns stacked states that remember these parts: inverts `read_states`."""
  # parts: float32[*lead, ...] by name. lead: number of workers, and of rows
  # that each encodes if there are any.
  # canonical: whether codecs of several levels share the state.

  def write(parts: PyTree, means: PyTree) -> PyTree:
    state = codec.write_memory(parts, means, like, lead[0])
    return codec.canonical_state(state) if canonical else state

  for rows in lead[:0:-1]:
    write = jax.vmap(write, axis_size=rows)
  means = {name: rows.mean(0) for name, rows in parts.items()}
  write = jax.vmap(write, (0, None), axis_size=lead[0])
  return core.map_shared(
    lambda node: core.Shared(jax.tree.map(lambda a: a[:1], node.value)),
    write(dict(parts), means),
  )


def resize_parts(
  codec: codecs.Codec,
  parts: Mapping[str, Array],
  shape: tuple[int, ...],
  workers: int,
  *,
  op: str = "mean",
  reset_memory: bool = False,
) -> dict[str, Array]:
  """Returns the parts of a codec's memory of one array, on other workers."""
  # parts: float32[old workers, *shape] by name; others are zeros.
  resized = {}
  for part in codec.memory_parts:
    if part.row_of is not None:
      continue
    rows = parts.get(part.name)
    # `reset_memory` forgets what is still to be sent.
    if rows is None or (reset_memory and part.is_pending):
      resized[part.name] = jnp.zeros((workers, *shape), jnp.float32)
      continue
    is_summed = op == "sum" and not part.keeps_mean
    scale = len(rows) / workers if is_summed else 1.0
    resized[part.name] = mix_rows(rows, workers) * scale
  return resized


def mix_rows(rows: Array, count: int) -> Array:
  """Returns rows of new workers, averages of the old rows they take over."""
  # rows: floating-point [old workers, ...].
  old = rows.shape[0]
  if old == count:
    return rows

  def mix(new: int) -> Array:
    """Returns the average of the old rows that one new row covers."""
    terms = []
    for r in range(old):
      # In units of 1 / (old * count), so that overlaps are exact.
      end = min((new + 1) * old, (r + 1) * count)
      overlap = end - max(new * old, r * count)
      if overlap > 0:
        terms.append(rows[r] * (overlap / old))
    while len(terms) > 1:  # In pairs: a mean of 2^n copies has no rounding.
      pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
      terms = pairs + terms[2 * len(pairs) :]
    return terms[0]

  return jnp.stack([mix(new) for new in range(count)])
