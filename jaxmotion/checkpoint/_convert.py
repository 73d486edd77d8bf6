"""Conversion of one exchange's state to the layout of today.

Masters and moments are arrays of the parameters' shapes, in which other workers
cut other dimensions and have other padding. Error memory is each worker's own:
it is read from the old rows, mixed, and cut into the new rows.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import core, transforms
from jaxmotion.checkpoint import _layout
from jaxmotion.codecs import MemoryPart
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives import extend as collective
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.transforms import extend


class Converter(NamedTuple):
  """Converts the state of one exchange of a chain, for `resize`."""

  old: extend.Options  # What the saved state is made for.
  like: Any  # Shapes of the state of today.
  old_layout: _layout.Layout
  new_layout: _layout.Layout
  reset_memory: bool  # Whether error memory starts from zero.
  # Old workers whose rows the state has, in the order of them; None: all.
  living: Sequence[int] | None = None

  @property
  def keeps_all(self) -> bool:
    """Whether the state is kept as it is."""
    is_same = self.old_layout.workers == self.new_layout.workers
    is_same &= self.old == self.like.made_for and self.living is None
    return is_same and not self.reset_memory

  def check(self) -> None:
    """Raises if something would be lost that is still to be sent."""
    # So it is where a codec with memory is followed by one without.
    if self.reset_memory or self.keeps_all:
      return
    codec = self.like.made_for.codecs[0]
    saved, today = map(_list_parts, (self.old, self.like.made_for))
    for path, parts in saved.items():
      names = [part.name for part in today[path]]
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
    """Converts the state to today's workers and codec, inside of `jit`."""
    new = self.like.made_for
    state = state._replace(made_for=new)
    if self.keeps_all:
      return state
    if isinstance(state, transforms.ShardedState):
      like, params = self.like, new.params
      state = state._replace(
        master=_fit_parts("master", state.master, like.master, params),
        inner=_fit_parts("inner", state.inner, like.inner, params),
      )
    return state._replace(codec_state=self._convert_memory(state.codec_state))

  def _convert_memory(self, memory: core.PerWorker) -> core.PerWorker:
    """Converts the memory of each shard of the model by itself."""
    if self.living is not None:
      memory = self._add_rows(memory)
    shards = math.prod(size for _, size in self.new_layout.model)
    # Rows of devices: shards of one worker follow one another.
    by_worker = jax.tree.map(
      lambda a: a.reshape(len(a) // shards, shards, *a.shape[1:]), memory.value
    )
    new = jax.vmap(self._convert_shard, 1, 1, axis_size=shards)(by_worker)
    return core.PerWorker(
      jax.tree.map(lambda a: a.reshape(len(a) * shards, *a.shape[2:]), new)
    )

  def _add_rows(self, memory: core.PerWorker) -> core.PerWorker:
    """Returns memory with rows of zeros for the workers that are lost."""
    # Where a worker keeps errors for all, places of rows have a meaning.
    workers, living = self.old_layout.sizes, np.asarray(self.living)
    old = core.count_devices(core.axis_names(self.old.axis_name), workers)

    def add_rows(a: Any) -> Any:
      if isinstance(a, core.Shared):
        return a
      return jnp.zeros((old, *a.shape[1:]), a.dtype).at[living].set(a)

    is_shared = lambda node: isinstance(node, core.Shared)
    return jax.tree.map(add_rows, memory, is_leaf=is_shared)

  def _convert_shard(self, states: PyTree) -> PyTree:
    """Returns codec states of today's workers, for one shard of the model."""
    old, new = self.old, self.like.made_for
    before, after = self.old_layout.sizes, self.new_layout.sizes
    if isinstance(old, extend.ShardedOptions):
      memory = _read_parts(states, extend.parts_layout(old, before))
      return _write_parts(
        memory, extend.parts_layout(new, after), reset_memory=self.reset_memory
      )
    assert isinstance(old, extend.ExchangeOptions)
    states = collective.convert_states(
      states,
      new.shard_params(after),
      old.state_layout(before),
      new.state_layout(after),
      op=new.op,
      reset_memory=self.reset_memory,
      living=self.living,
    )
    return core.name_axes(states, core.split_axes(new.axis_name)[0])


def convert_fully_sharded(
  state: transforms.FullyShardedState,
  like: transforms.FullyShardedState,
  params: PyTree,
  *,
  reset_memory: bool,
) -> transforms.FullyShardedState:
  """Converts a state of `fully_sharded`: padding, and error memory by rows."""
  old, new = state.made_for, like.made_for
  if old == new and not reset_memory:
    return state
  memory = {} if reset_memory else _list_errors(state)
  likes, errors = _list_errors(like), []
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
      rows = resize_rows(rows, new.workers)
      errors.append(jax.vmap(new.cuts[i].pad_leaf)(rows))
    else:  # All workers held the leaf whole: nothing is still to be sent.
      errors.append(jnp.zeros(shape.shape, shape.dtype))
  treedef: Any = jax.tree.structure(like.error)
  return state._replace(
    inner=_fit_parts("inner", state.inner, like.inner, params),
    error=treedef.unflatten(errors),
    made_for=new,
  )


def _list_errors(state: transforms.FullyShardedState) -> dict[int, Any]:
  """Returns the error memory of leaves that have one, by their positions."""
  cut = [i for i, cut in enumerate(state.made_for.cuts) if cut.is_cut]
  # There is no memory at all without error feedback.
  return dict(zip(cut, jax.tree.leaves(state.error), strict=False))


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
  state: extend.DelayedState, workers: int
) -> extend.DelayedState:
  """Returns the gradients and weights of a delayed step for other workers."""
  # The mean of the gradients, by the workers' weights, stays the same.
  grads, weight = state.pending.value
  if weight is None or weight.shape[0] == workers:
    return state
  mixed = jax.tree.map(lambda g: _mix_weighted(g, weight, workers), grads)
  pending = core.PerWorker((mixed, resize_rows(weight, workers)))
  return state._replace(pending=pending)


def _mix_weighted(rows: Array, weight: Array, workers: int) -> Array:
  """Returns weighted means of old workers' arrays, one for each new worker."""
  # `weight`: float32[old workers].
  weight = weight.reshape(-1, *[1] * (rows.ndim - 1))
  total = resize_rows(weight, workers)
  # What a worker without a weight has counts for nothing, were it not finite.
  weighted = resize_rows(jnp.where(weight > 0, weight * rows, 0), workers)
  mean = weighted / jnp.where(total > 0, total, 1)
  # Right after an exchange nobody has a weight.
  mean = jnp.where(total > 0, mean, resize_rows(rows, workers))
  return mean.astype(rows.dtype)


def _list_parts(options: extend.Options) -> dict[str, tuple[MemoryPart, ...]]:
  """Returns what a codec remembers of each leaf, by the path of the leaf."""
  arrays = partition(options.codecs[0], options.params)
  parts = {
    arrays.leaves[i][0]: group.codec.memory_parts
    for group in arrays.leaf_groups
    for i in group.leaves
  }
  return dict(sorted(parts.items()))


def _fit_parts(
  name: str, state: core.Split, like: core.Split, params: PyTree
) -> core.Split:
  """Returns masters or moments with the padding of today's workers."""
  # like: shapes of those of today. params: whole parameters.
  param_of_path = dict(jax.tree.leaves_with_path(params))
  treedef: Any = jax.tree.structure(like)
  named = jax.tree.leaves_with_path(state.value)
  news = jax.tree.leaves_with_path(like.value)
  if [path for path, _ in named] != [path for path, _ in news]:
    remedy = "Keep the chain inside of `sharded`."
    if name == "master":
      remedy = (
        "A `weight_codec` keeps a master; `codecs.identity()` does too."
        if named
        else "Give `weight_codec=None`, which keeps no master."
      )
    raise ValueError(
      f"`tx` must have the `{name}` arrays of the saved state: "
      f"{len(named)} of them, got {len(news)}. {remedy}"
    )
  leaves = []
  for (path, x), (_, new), *cut in zip(
    named, news, state.dimensions, like.dimensions, strict=True
  ):
    # cut: the dimensions that the old and the new workers cut.
    is_whole = cut == [None, None] and x.shape == new.shape
    if not is_whole and not _is_like_parameter(path, x, cut[0], param_of_path):
      raise ValueError(
        "`tx` must keep arrays of the parameters' shapes inside of `sharded` to"
        f" be continued by other workers, got `{name}/{core.leaf_path(path)}` "
        f"of shape {x.shape}: continue it by as many workers, or without what "
        "encodes moments, such as `memory.compress_state`."
      )
    leaves.append(x if x.shape == new.shape else _fit_shape(x, new.shape))
  return treedef.unflatten(leaves)


def _is_like_parameter(
  path: Any, x: ShapedLike, cut: int | None, params: dict[Any, Any]
) -> bool:
  """Returns whether an array has a parameter's shape, but for padding."""
  # That is the parameter whose path ends the array's, such as a moment's; of
  # several paths the longest one. cut: the dimension of it that is padded.
  # params: by path.
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return False  # Counts and keys are of no parameter.
  for start in range(len(path) + 1):
    like = params.get(tuple(path[start:]))
    if like is not None and len(like.shape) == len(x.shape):
      return all(
        n == m or (i == cut and n > m)
        for i, (n, m) in enumerate(zip(x.shape, like.shape, strict=True))
      )
  return False


def _fit_shape(x: Array, shape: tuple[int, ...]) -> Array:
  """Returns an array without its old padding, and with that of a new shape."""
  for axis, length in enumerate(shape):
    x = jax.lax.slice_in_dim(x, 0, min(x.shape[axis], length), axis=axis)
  # Gradients of padding are zero, so its moments are.
  padding = [(0, n - m) for n, m in zip(shape, x.shape, strict=True)]
  return jnp.pad(x, padding)


def _read_parts(
  states: PyTree, layout: extend.PartsLayout
) -> list[dict[str, Array]]:
  """Returns what workers of `sharded` remember of each leaf, by part's name."""
  cut_states, whole_states = states
  memory = collective.read_memory(
    whole_states, layout.whole, layout.whole_layout
  )
  whole_parts = {name: iter(jax.tree.leaves(a)) for name, a in memory.items()}
  next_state = iter(cut_states)
  leaf_memory = []
  for cut, codec, like in layout.leaves:
    if cut.dimension is None:
      leaf_memory.append({name: next(a) for name, a in whole_parts.items()})
      continue
    parts = collective.read_states(codec, next(next_state), like, 2)
    leaf_memory.append(
      {name: _join_rows(rows, cut, layout) for name, rows in parts.items()}
    )
  return leaf_memory


def _write_parts(
  leaf_memory: list[dict[str, Array]],
  layout: extend.PartsLayout,
  *,
  reset_memory: bool,
) -> PyTree:
  """Returns states of `sharded` that remember this: inverts `_read_parts`."""
  cut_states, whole_parts = [], []
  for parts, (cut, codec, like) in zip(leaf_memory, layout.leaves, strict=True):
    if cut.dimension is None:
      whole_parts.append(parts)
      continue
    resized = collective.resize_parts(
      codec, parts, cut.shape, layout.hosts, reset_memory=reset_memory
    )
    rows = {name: _cut_rows(a, cut, layout) for name, a in resized.items()}
    lead = layout.hosts * layout.devices, layout.hosts
    cut_states.append(collective.write_states(codec, rows, like, lead))
  shapes = jax.tree.leaves(layout.whole)
  treedef: Any = jax.tree.structure(layout.whole)
  memory = {
    name: treedef.unflatten(
      [
        parts.get(name, jnp.zeros((1, *x.shape), jnp.float32))
        for parts, x in zip(whole_parts, shapes, strict=True)
      ]
    )
    for name in sorted(set().union(*whole_parts))
  }
  return cut_states, collective.write_memory(
    memory, layout.whole, layout.whole_layout, reset_memory=reset_memory
  )


def _join_rows(
  rows: Array, cut: extend.LeafCut, layout: extend.PartsLayout
) -> Array:
  """Returns each host's error of the whole leaf, from rows of all devices."""
  # Device d of a host has the rows of the devices d of all hosts.
  hosts, devices = layout.hosts, layout.devices
  parts = rows.reshape(hosts, devices, hosts, *rows.shape[2:])
  parts = parts.swapaxes(1, 2).reshape(hosts, hosts * devices, *rows.shape[2:])
  return jax.vmap(cut.join_rows)(parts)


def _cut_rows(
  errors: Array, cut: extend.LeafCut, layout: extend.PartsLayout
) -> Array:
  """Cuts each host's error of a leaf into rows of all devices."""
  hosts, devices = layout.hosts, layout.devices
  parts = jax.vmap(cut.cut_rows)(errors)
  shape = parts.shape[2:]
  parts = parts.reshape(hosts, hosts, devices, *shape).swapaxes(1, 2)
  return parts.reshape(hosts * devices, hosts, *shape)


def resize_rows(rows: Array, workers: int) -> Array:
  """Returns rows of a per-worker array for another number of workers."""
  # Floats are mixed, so that the workers' mean stays. Others are taken from the
  # nearest old worker; keys become different ones.
  old = rows.shape[0]
  if old == workers:
    return rows
  if jnp.issubdtype(rows.dtype, jnp.floating):
    return collective.mix_rows(rows, workers).astype(rows.dtype)
  nearest = rows[jnp.asarray([j * old // workers for j in range(workers)])]
  if core.is_key(rows):
    return jax.vmap(jax.random.fold_in)(nearest, jnp.arange(workers))
  return nearest
