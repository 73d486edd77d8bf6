"""Conversion of state that workers cut between them.

Masters and moments are arrays of the parameters' shapes, in which other workers
cut other dimensions and have other padding. Error memory is each worker's own:
it is read from the old rows, mixed, and cut into the new rows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.collectives.extend import (
  mix_rows,
  read_memory,
  read_states,
  resize_parts,
  write_memory,
  write_states,
)
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.transforms.extend import LeafCut, PartsLayout, is_key


def fit_parts(
  name: str, state: core.Split, like: core.Split, params: PyTree
) -> core.Split:
  """Returns arrays that workers cut, with the padding of other workers."""
  of_path = dict(jax.tree.leaves_with_path(params))
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
    is_kept = cut == [None, None] and x.shape == new.shape
    if not is_kept and not _is_like_parameter(path, x, cut, of_path):
      raise ValueError(
        "`tx` must keep arrays of the parameters' shapes inside of `sharded` to"
        f" be continued by other workers, got `{name}/{core.leaf_path(path)}` "
        f"of shape {x.shape}: continue it by as many workers, or without what "
        "encodes moments, such as `memory.compress_state`."
      )
    leaves.append(x if x.shape == new.shape else _fit_shape(x, new.shape))
  return treedef.unflatten(leaves)


def _is_like_parameter(
  path: Any, x: ShapedLike, cut: list[int | None], params: dict[Any, Any]
) -> bool:
  """Returns whether an array has a parameter's shape, but for padding."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return False
  for start in range(len(path) + 1):
    like = params.get(tuple(path[start:]))
    if like is not None and len(like.shape) == len(x.shape):
      return all(
        n == m or (i == cut[0] and n > m)
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


def read_parts(states: PyTree, layout: PartsLayout) -> list[dict[str, Array]]:
  """Returns the parts of each leaf's memory: float32[workers, ...]."""
  cut_states, whole_states = states
  memory = read_memory(whole_states, layout.whole, layout.whole_layout)
  whole_parts = {name: iter(jax.tree.leaves(a)) for name, a in memory.items()}
  remaining = iter(cut_states)
  found = []
  for cut, codec, like in layout.leaves:
    if cut.dimension is None:
      found.append({name: next(a) for name, a in whole_parts.items()})
      continue
    parts = read_states(codec, next(remaining), like, 2)
    found.append(
      {name: _join_rows(rows, cut, layout) for name, rows in parts.items()}
    )
  return found


def write_parts(
  found: list[dict[str, Array]], layout: PartsLayout, *, reset_memory: bool
) -> PyTree:
  """Returns the states of workers that remember these parts of each leaf."""
  cut_states, whole_parts = [], []
  for parts, (cut, codec, like) in zip(found, layout.leaves, strict=True):
    if cut.dimension is None:
      whole_parts.append(parts)
      continue
    resized = resize_parts(
      codec, parts, cut.shape, layout.hosts, reset_memory=reset_memory
    )
    rows = {name: _cut_rows(a, cut, layout) for name, a in resized.items()}
    lead = layout.hosts * layout.devices, layout.hosts
    cut_states.append(write_states(codec, rows, like, lead))
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
  return cut_states, write_memory(
    memory, layout.whole, layout.whole_layout, reset_memory=reset_memory
  )


def _join_rows(rows: Array, cut: LeafCut, layout: PartsLayout) -> Array:
  """Returns every host's error of the leaf, from rows of all workers."""
  # Device d of a host has the rows of the devices d of all hosts.
  hosts, devices = layout.hosts, layout.devices
  parts = rows.reshape(hosts, devices, hosts, *rows.shape[2:])
  parts = parts.swapaxes(1, 2).reshape(hosts, hosts * devices, *rows.shape[2:])
  return jax.vmap(cut.join_rows)(parts)


def _cut_rows(errors: Array, cut: LeafCut, layout: PartsLayout) -> Array:
  """Returns the rows of all workers: inverts `_join_rows`."""
  hosts, devices = layout.hosts, layout.devices
  parts = jax.vmap(cut.cut_rows)(errors)
  shape = parts.shape[2:]
  parts = parts.reshape(hosts, hosts, devices, *shape).swapaxes(1, 2)
  return parts.reshape(hosts * devices, hosts, *shape)


def resize_rows(rows: Array, workers: int) -> Array:
  """Returns a leaf of per-worker state for another number of workers."""
  old = rows.shape[0]
  if old == workers:
    return rows
  if jnp.issubdtype(rows.dtype, jnp.floating):
    return mix_rows(rows, workers).astype(rows.dtype)
  nearest = rows[jnp.asarray([j * old // workers for j in range(workers)])]
  if is_key(rows):
    return jax.vmap(jax.random.fold_in)(nearest, jnp.arange(workers))
  return nearest
