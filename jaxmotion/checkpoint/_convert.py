"""Conversion of one exchange's state to the layout of today."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core, transforms
from jaxmotion.checkpoint import _layout, _parts
from jaxmotion.codecs import Codec
from jaxmotion.collectives.extend import (
  PARTS,
  StateLayout,
  convert_states,
  list_remembered,
)
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms.extend import DelayedState

# What a codec of today that does not remember a part would lose.
_LOST = {
  "error": "What is still to be sent would be lost: wrap it in `feedback`",
  "momentum": "It would be lost: wrap the codec in `momentum_correction`",
  "sent": "Differences to it would be lost: wrap the codec in `ef21`",
}


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
    codecs = [_gradient_codec(entry) for entry in (self.old, self.new)]
    held, now = (list_remembered(self.params, codec) for codec in codecs)
    for path, parts in held.items():
      for part in parts:
        if part not in now[path]:
          raise ValueError(
            f"`tx` must have {PARTS[part]} for {path!r}, as the saved state "
            f"has, got {codecs[1]!r}. {_LOST[part]}, or give reset_memory=True."
          )

  def convert(self, state: Any) -> Any:
    """Returns the state for today's workers and codec."""
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
      _state_layout(self.old, self.old_layout),
      _state_layout(self.new, self.new_layout),
      op=self.new.op,
      reset_memory=self.reset_memory,
    )
    return core.name_axes(new, self.new.axis_name)

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
      _parts_layout(self.old, self.old_layout),
      _parts_layout(self.new, self.new_layout),
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
    if shards == 1:
      return core.PerWorker(convert(states))
    # Rows of devices: those of one worker follow one another.
    by_worker = jax.tree.map(
      lambda a: a.reshape(-1, shards, *a.shape[1:]), states
    )
    parts = [
      convert(jax.tree.map(lambda a, m=m: a[:, m], by_worker))
      for m in range(shards)
    ]

    def join(*leaves: Any) -> Any:
      return jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:])

    return core.PerWorker(jax.tree.map(join, *parts))


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
  old, new = (jax.tree.leaves(s.error.value) for s in (state, like))
  if reset_memory:
    errors = [jnp.zeros(x.shape, x.dtype) for x in new]
  elif by_device and old:
    raise ValueError(
      "`mesh` must have the hosts and devices of `layout` for `fully_sharded` "
      "with error memory and a `local_axis`, whose devices remember what each "
      "sends: give reset_memory=True to forget it."
    )
  elif [x.shape[1:] for x in old] != [x.shape[1:] for x in new]:
    # A leaf that no number of today divides is whole, and has no memory.
    raise ValueError(
      "`mesh` must have workers that divide the leaves that the saved state has"
      f" error memory of, of shapes {[x.shape[1:] for x in old]}, got those of "
      f"{[x.shape[1:] for x in new]}: give reset_memory=True to forget what is "
      "still to be sent."
    )
  else:
    errors = [_parts.resize_rows(x, workers) for x in old]
  treedef: Any = jax.tree.structure(like.error)
  return state._replace(
    inner=_parts.fit_parts("inner", state.inner, like.inner, likes),
    error=treedef.unflatten(errors),
  )


def convert_local(
  state: transforms.LocalState, divide: Callable[[PyTree], Any], workers: int
) -> transforms.LocalState:
  """Returns own parameters and weights of `local_updates` for other workers."""
  # The mean of what workers have changed, by their weights, stays the same.
  if not isinstance(state.weights, core.PerWorker):
    return state
  weights = state.weights.value
  if weights.shape[0] == workers:
    return state
  owners = divide(state.anchor).owners
  own = jax.tree.leaves(state.params)
  treedef: Any = jax.tree.structure(state.params)

  mixed = [
    _mix_weighted(p, weights[:, owner], workers)
    for p, owner in zip(own, owners, strict=True)
  ]
  return state._replace(params=treedef.unflatten(mixed))


def convert_delayed(state: DelayedState, workers: int) -> DelayedState:
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
  entry: _layout.ExchangeLayout | _layout.ShardedLayout,
  layout: _layout.Layout,
) -> PyTree:
  """Returns the shapes of one device's shards of parameters.

  Args:
    params: tree of shapes, of the leaves of `entry`.
    entry: how an exchange shards them over axes of the model.
    layout: tells the lengths of these axes.
  """
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


def _gradient_codec(
  entry: _layout.ExchangeLayout | _layout.ShardedLayout,
) -> Codec:
  if isinstance(entry, _layout.ShardedLayout):
    return entry.gradient_codec
  return entry.codecs[0]


def _state_layout(
  entry: _layout.ExchangeLayout, layout: _layout.Layout
) -> StateLayout:
  workers, local_axis = (
    _layout.count_workers(layout, entry.axis_name),
    entry.local_axis,
  )
  devices = (
    None if local_axis is None else _layout.count_workers(layout, local_axis)
  )
  return StateLayout(
    entry.codecs[0], workers, entry.method, devices, len(entry.codecs) > 1
  )


def _parts_layout(
  entry: _layout.ShardedLayout, layout: _layout.Layout
) -> _parts.PartsLayout:
  return _parts.PartsLayout(
    entry.gradient_codec,
    _layout.count_workers(layout, entry.axis_name),
    _layout.count_workers(layout, entry.local_axis or ()),
    [
      [i for i, names in enumerate(spec) if names]
      for spec in entry.specs or [()] * len(entry.leaves)
    ],
  )
