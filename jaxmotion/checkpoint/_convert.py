"""Conversion of one exchange's state to the layout of today."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core, transforms
from jaxmotion.checkpoint import _layout, _parts
from jaxmotion.codecs import Codec, MemoryPart
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives.extend import StateLayout, convert_states
from jaxmotion.core import Array, PyTree


class Converter(NamedTuple):
  """Converts the state of one exchange to the layout of today.

  Attributes:
    old: entry of the saved layout.
    new: entry of the layout of today.
    params: shapes of what is exchanged.
    old_layout: the saved layout.
    new_layout: the layout of today.
    like: shapes of the state of today.
    reset_memory: whether error memory starts from zero.
  """

  old: Any
  new: Any
  params: PyTree
  old_layout: _layout.Layout
  new_layout: _layout.Layout
  like: Any
  reset_memory: bool

  @property
  def is_same(self) -> bool:
    """Whether the state is kept as it is."""
    layouts = (self.old_layout, self.new_layout)
    workers = {layout.workers for layout in layouts}
    return self.old == self.new and len(workers) == 1

  def check(self) -> None:
    """Raises if something would be lost that is still to be sent."""
    if self.reset_memory or self.is_same:
      return
    # Made by a codec that remembers, continued by one that does not.
    codecs = [entry.codecs[0] for entry in (self.old, self.new)]
    held, now = (_list_parts(self.params, codec) for codec in codecs)
    for path, parts in held.items():
      names = [part.name for part in now[path]]
      for part in parts:
        if (part.row_of or part.name) not in names:
          noun = part.noun or f"a memory of {part.name!r}"
          lost = "What is still to be sent" if part.is_pending else "It"
          keep = "take a codec that keeps it"
          if part.kept_by:
            keep = f"wrap the codec in `{part.kept_by}`"
          raise ValueError(
            f"`tx` must have {noun} for {path!r}, as the saved state has, got "
            f"{codecs[1]!r}. {lost} would be lost: {keep}, or give "
            "reset_memory=True."
          )

  def convert(self, state: Any) -> Any:
    """Returns the state for today's workers and codec."""
    state = state._replace(made_for=self.like.made_for)
    if self.is_same and not self.reset_memory:
      return state
    if isinstance(state, transforms.ShardedState):
      return self._convert_sharded(state)
    return state._replace(
      codec_state=self._convert_memory(state, self._convert_exchange)
    )

  def _convert_exchange(self, states: PyTree) -> PyTree:
    new = convert_states(
      states,
      shard_shapes(self.params, self.new, self.new_layout),
      state_layout(self.old, self.old_layout),
      state_layout(self.new, self.new_layout),
      op=self.new.op,
      reset_memory=self.reset_memory,
    )
    return core.name_axes(new, core.split_axes(self.new.axis_name)[0])

  def _convert_sharded(
    self, state: transforms.ShardedState
  ) -> transforms.ShardedState:
    paths = dict(jax.tree.leaves_with_path(self.params))
    return state._replace(
      master=_parts.fit_parts("master", state.master, self.like.master, paths),
      inner=_parts.fit_parts("inner", state.inner, self.like.inner, paths),
      codec_state=self._convert_memory(state, self._convert_parts),
    )

  def _convert_parts(self, states: PyTree) -> PyTree:
    shapes = shard_shapes(self.params, self.new, self.new_layout)
    return _parts.convert_parts(
      states,
      shapes,
      parts_layout(self.old, self.old_layout),
      parts_layout(self.new, self.new_layout),
      reset_memory=self.reset_memory,
    )

  def _convert_memory(
    self,
    state: transforms.ExchangeState | transforms.ShardedState,
    convert: Callable[..., PyTree],
  ) -> core.PerWorker:
    """Converts the memory of each shard of the model by itself."""
    states = state.codec_state.value
    shards = math.prod(size for _, size in self.new_layout.model)
    # Rows of devices: those of one worker follow one another.
    by_worker = jax.tree.map(
      lambda a: a.reshape(len(a) // shards, shards, *a.shape[1:]), states
    )
    new = jax.vmap(convert, 1, 1, axis_size=shards)(by_worker)
    return core.PerWorker(
      jax.tree.map(lambda a: a.reshape(len(a) * shards, *a.shape[2:]), new)
    )


def convert_fully_sharded(
  state: transforms.FullyShardedState,
  like: transforms.FullyShardedState,
  params: PyTree,
  workers: int,
  *,
  by_device: bool,
  reset_memory: bool,
) -> transforms.FullyShardedState:
  """Returns the state of `fully_sharded` for other workers."""
  likes = dict(jax.tree.leaves_with_path(params))
  errors = [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(like.error)]
  if not reset_memory:
    if by_device and errors:
      raise ValueError(
        "`mesh` must have the hosts and devices of `layout` for `fully_sharded`"
        " with error memory and `HostAxes`, whose devices remember what each "
        "sends: give reset_memory=True to forget it."
      )
    errors = _convert_errors(state, like, workers)
  treedef: Any = jax.tree.structure(like.error)
  return state._replace(
    inner=_parts.fit_parts("inner", state.inner, like.inner, likes),
    error=treedef.unflatten(errors),
    made_for=like.made_for,
  )


def _convert_errors(
  state: transforms.FullyShardedState,
  like: transforms.FullyShardedState,
  workers: int,
) -> list[Array]:
  """Returns the error memory of leaves with the padding of other workers."""
  errors = []
  old, new = (_list_errors(one) for one in (state, like))
  for (before, rows), (after, shape) in zip(old, new, strict=True):
    if rows is None:
      # All workers held the leaf whole: nothing of it is still to be sent.
      if shape is not None:
        errors.append(jnp.zeros(shape.shape, shape.dtype))
      continue
    if shape is None:
      raise ValueError(
        "`mesh` must have few enough workers to cut the leaves that the saved "
        f"state has error memory of, got {workers}, which hold that of shape "
        f"{after.shape} whole: give reset_memory=True to forget what is still "
        "to be sent."
      )
    rows = _parts.resize_rows(jax.vmap(before.trim_leaf)(rows), workers)
    errors.append(jax.vmap(after.pad_leaf)(rows))
  return errors


def _list_errors(state: transforms.FullyShardedState) -> list[tuple[Any, Any]]:
  """Returns how each leaf is cut, and its error memory or None."""
  errors = iter(jax.tree.leaves(state.error))
  return [
    (cut, None if cut.dimension is None else next(errors, None))
    for cut in state.made_for.cuts
  ]


def convert_local(
  state: transforms.LocalState, owners: Sequence[int], workers: int
) -> transforms.LocalState:
  """Returns own parameters and weights of `local_updates` for other workers."""
  # The mean of what workers have changed, by their weights, stays the same.
  if not isinstance(state.weights, core.PerWorker):
    return state
  weights = state.weights.value
  if weights.shape[0] == workers:
    return state
  own = jax.tree.leaves(state.params)
  treedef: Any = jax.tree.structure(state.params)

  mixed = [
    _mix_weighted(p, weights[:, owner], workers)
    for p, owner in zip(own, owners, strict=True)
  ]
  return state._replace(params=treedef.unflatten(mixed))


def convert_delayed(
  state: transforms.DelayedState, workers: int
) -> transforms.DelayedState:
  """Returns the gradients and weights of a delayed step for other workers."""
  # The mean of the gradients, by the workers' weights, stays the same.
  grads, weight = state.pending.value
  if weight is None or weight.shape[0] == workers:
    return state
  mixed = jax.tree.map(lambda g: _mix_weighted(g, weight, workers), grads)
  pending = core.PerWorker((mixed, _parts.resize_rows(weight, workers)))
  return state._replace(pending=pending)


def _mix_weighted(rows: Array, weight: Array, workers: int) -> Array:
  """Returns what each worker has for other workers, mixed by weights."""
  # `weight`: float32[old workers].
  weight = weight.reshape(-1, *[1] * (rows.ndim - 1))
  total = _parts.resize_rows(weight, workers)
  # What a worker without a weight has counts for nothing, were it not finite.
  heavy = _parts.resize_rows(jnp.where(weight > 0, weight * rows, 0), workers)
  moved = heavy / jnp.where(total > 0, total, 1)
  # Right after an exchange nobody has a weight.
  return jnp.where(total > 0, moved, _parts.resize_rows(rows, workers)).astype(
    rows.dtype
  )


def shard_shapes(
  params: PyTree,
  entry: _layout.ExchangeLayout,
  layout: _layout.Layout,
) -> PyTree:
  """Returns the shapes of one device's shards of parameters."""
  # params: shapes of the leaves of `entry`, which says how they are sharded.
  # layout: tells the lengths of axes of the model.
  if not entry.specs:
    return params
  sizes = dict(layout.model)
  shards = [
    jax.ShapeDtypeStruct(
      [
        n // math.prod(sizes[name] for name in names)
        for n, names in zip(x.shape, spec, strict=True)
      ],
      x.dtype,
    )
    for x, spec in zip(jax.tree.leaves(params), entry.specs, strict=True)
  ]
  return jax.tree.unflatten(jax.tree.structure(params), shards)


def _list_parts(
  params: PyTree, codec: Codec
) -> dict[str, tuple[MemoryPart, ...]]:
  """Returns what a codec remembers of each leaf, by the path of the leaf."""
  arrays = partition(codec, params)
  found = {
    arrays.leaves[i][0]: group.codec.memory_parts
    for group in arrays.leaf_groups
    for i in group.leaves
  }
  return dict(sorted(found.items()))


def state_layout(
  entry: _layout.ExchangeLayout, layout: _layout.Layout
) -> StateLayout:
  """Returns how an exchange keeps the states of its arrays."""
  axes, local = core.split_axes(entry.axis_name)
  return StateLayout(
    entry.codecs[0],
    _layout.count_workers(layout, axes),
    entry.method,
    _layout.count_workers(layout, local) if local else None,
    len(entry.codecs) > 1,
  )


def parts_layout(
  entry: _layout.ExchangeLayout, layout: _layout.Layout
) -> _parts.PartsLayout:
  """Returns how `sharded` keeps the states of its codec."""
  axes, local = core.split_axes(entry.axis_name)
  return _parts.PartsLayout(
    entry.codecs[0],
    _layout.count_workers(layout, axes),
    _layout.count_workers(layout, local),
    [
      [i for i, names in enumerate(spec) if names]
      for spec in entry.specs or [()] * len(entry.leaves)
    ],
  )
