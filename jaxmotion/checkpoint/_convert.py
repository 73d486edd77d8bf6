"""Conversion of one exchange's state to the layout of today."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core, transforms
from jaxmotion.checkpoint import _layout, _parts
from jaxmotion.codecs import MemoryPart
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives.extend import convert_states
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms.extend import (
  ExchangeOptions,
  Options,
  ShardedOptions,
  parts_layout,
)


class Converter(NamedTuple):
  """Converts the state of one exchange to the layout of today.

  Attributes:
    old: what the saved state is made for.
    like: shapes of the state of today.
    old_layout: the saved layout.
    new_layout: the layout of today.
    reset_memory: whether error memory starts from zero.
  """

  old: Options
  like: Any
  old_layout: _layout.Layout
  new_layout: _layout.Layout
  reset_memory: bool

  @property
  def keeps_all(self) -> bool:
    """Whether the state is kept as it is."""
    is_same = self.old_layout.workers == self.new_layout.workers
    return is_same and self.old == self.like.made_for and not self.reset_memory

  def check(self) -> None:
    """Raises if something would be lost that is still to be sent."""
    if self.reset_memory or self.keeps_all:
      return
    # Made by a codec that remembers, continued by one that does not.
    codec = self.like.made_for.codecs[0]
    held, now = map(_list_parts, (self.old, self.like.made_for))
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
            f"{codec!r}. {lost} would be lost: {keep}, or give "
            "reset_memory=True."
          )

  def convert(self, state: Any) -> Any:
    """Returns the state for today's workers and codec."""
    new = self.like.made_for
    state = state._replace(made_for=new)
    if self.keeps_all:
      return state
    if isinstance(state, transforms.ShardedState):
      like, params = self.like, new.params
      state = state._replace(
        master=_parts.fit_parts("master", state.master, like.master, params),
        inner=_parts.fit_parts("inner", state.inner, like.inner, params),
      )
    return state._replace(codec_state=self._convert_memory(state.codec_state))

  def _convert_memory(self, memory: core.PerWorker) -> core.PerWorker:
    """Converts the memory of each shard of the model by itself."""
    shards = math.prod(size for _, size in self.new_layout.model)
    # Rows of devices: those of one worker follow one another.
    by_worker = jax.tree.map(
      lambda a: a.reshape(len(a) // shards, shards, *a.shape[1:]), memory.value
    )
    new = jax.vmap(self._convert_shard, 1, 1, axis_size=shards)(by_worker)
    return core.PerWorker(
      jax.tree.map(lambda a: a.reshape(len(a) * shards, *a.shape[2:]), new)
    )

  def _convert_shard(self, states: PyTree) -> PyTree:
    old, new = self.old, self.like.made_for
    before, after = self.old_layout.sizes, self.new_layout.sizes
    if isinstance(old, ShardedOptions):
      found = _parts.read_parts(states, parts_layout(old, before))
      return _parts.write_parts(
        found, parts_layout(new, after), reset_memory=self.reset_memory
      )
    assert isinstance(old, ExchangeOptions)
    states = convert_states(
      states,
      new.shard_params(after),
      old.state_layout(before),
      new.state_layout(after),
      op=new.op,
      reset_memory=self.reset_memory,
    )
    return core.name_axes(states, core.split_axes(new.axis_name)[0])


def convert_fully_sharded(
  state: transforms.FullyShardedState,
  like: transforms.FullyShardedState,
  params: PyTree,
  *,
  reset_memory: bool,
) -> transforms.FullyShardedState:
  """Returns the state of `fully_sharded` for other workers."""
  if state.made_for == like.made_for and not reset_memory:
    return state
  memory = {} if reset_memory else _list_errors(state)
  errors = list(_convert_errors(memory, state, like))
  treedef: Any = jax.tree.structure(like.error)
  return state._replace(
    inner=_parts.fit_parts("inner", state.inner, like.inner, params),
    error=treedef.unflatten(errors),
    made_for=like.made_for,
  )


def _list_errors(state: transforms.FullyShardedState) -> dict[int, Any]:
  """Returns the error memory of leaves that have one, by their positions."""
  cut = [i for i, cut in enumerate(state.made_for.cuts) if cut.is_cut]
  # There is no memory at all without error feedback.
  return dict(zip(cut, jax.tree.leaves(state.error), strict=False))


def _convert_errors(
  memory: dict[int, Array],
  state: transforms.FullyShardedState,
  like: transforms.FullyShardedState,
) -> Iterator[Array]:
  """Yields the error memory of leaves with the padding of other workers."""
  old, new, likes = state.made_for, like.made_for, _list_errors(like)
  by_device = any(one.hosts != one.workers for one in (old, new))
  if memory and likes and by_device:
    raise ValueError(
      "`mesh` must have the hosts and devices of `layout` for `fully_sharded`"
      " with error memory and `HostAxes`, whose devices remember what "
      "each sends: give reset_memory=True to forget it."
    )
  for i in sorted(memory.keys() - likes.keys()):
    raise ValueError(
      "`mesh` must have few enough workers to cut the leaves that the saved "
      f"state has error memory of, got {new.workers}, which hold that of shape "
      f"{new.cuts[i].shape} whole: give reset_memory=True to forget what is "
      "still to be sent."
    )
  for i, shape in likes.items():
    if i in memory:
      rows = jax.vmap(old.cuts[i].trim_leaf)(memory[i])
      rows = _parts.resize_rows(rows, new.workers)
      yield jax.vmap(new.cuts[i].pad_leaf)(rows)
    else:  # All workers held the leaf whole: nothing is still to be sent.
      yield jnp.zeros(shape.shape, shape.dtype)


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


def _list_parts(options: Options) -> dict[str, tuple[MemoryPart, ...]]:
  """Returns what a codec remembers of each leaf, by the path of the leaf."""
  arrays = partition(options.codecs[0], options.params)
  found = {
    arrays.leaves[i][0]: group.codec.memory_parts
    for group in arrays.leaf_groups
    for i in group.leaves
  }
  return dict(sorted(found.items()))
