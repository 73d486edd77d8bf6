"""Layout of a model's parameters: stages, packets, groups and levels.

`stage_index` is the position of a stage in the model, and `packet_index` that
of a packet in its stage. Leaves have a position in their stage
(`stage_indices`) and one in the whole model (`model_indices`).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, controllers, core
from jaxmotion.core import PyTree

Rules = Sequence[tuple[str, str | None]]
DEVICE_DTYPES = ("float32", "bfloat16", "float16")


class Packet(NamedTuple):
  """Leaves of one stage that travel under one codec."""

  # Index of the group whose level picks the codec; None for float32.
  group: int | None
  stage_indices: tuple[int, ...]
  model_indices: tuple[int, ...]
  likes: tuple[jax.ShapeDtypeStruct, ...]  # With the dtype on the device.


class StageLayout(NamedTuple):
  """Layout of the parameters of one stage."""

  treedef: Any
  model_indices: tuple[int, ...]
  likes: tuple[jax.ShapeDtypeStruct, ...]  # With the dtype on the device.
  packets: tuple[Packet, ...]  # Together they hold every leaf once.


class Layout(NamedTuple):
  """Layout of a model's parameters."""

  groups: controllers.Groups  # Of the leaves that are encoded.
  stages: tuple[StageLayout, ...]  # In the order of the forward pass.

  def leaf_codecs(self, codec: codecs.Codec) -> tuple[codecs.Codec, ...]:
    """Returns `codec` for every leaf of a group, `identity` for the others."""
    return tuple(
      codecs.identity() if group is None else codec
      for group in self.groups.of_leaf
    )


def make_layout(
  params: PyTree,
  names: tuple[str, ...] | None,
  rules: Rules | None,
  min_leaf_size: int,
  device_dtype: Any,
) -> Layout:
  """Returns the layout of a model's parameters."""
  if names is not None and (
    not isinstance(params, Mapping) or set(params) != set(names)
  ):
    given = sorted(params) if isinstance(params, Mapping) else type(params)
    raise ValueError(
      f"`params` must be a mapping with the stages {sorted(names)}, "
      f"got {given!r}."
    )
  if not jax.tree.leaves(params):
    raise ValueError(
      f"`params` must hold at least one array, got {params!r:.200}."
    )
  leaves, treedef = jax.tree.flatten(params)
  likes = tuple(
    jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves
  )
  return _make_layout(treedef, likes, names, rules, min_leaf_size, device_dtype)


@functools.lru_cache(maxsize=64)
def _make_layout(
  treedef: Any,
  likes: tuple[jax.ShapeDtypeStruct, ...],
  names: tuple[str, ...] | None,
  rules: Rules | None,
  min_leaf_size: int,
  device_dtype: Any,
) -> Layout:
  """Returns the layout of parameters of some shapes, the same one each time."""
  params = treedef.unflatten(likes)
  for path, x in core.named_leaves(params):
    if x.dtype not in (jnp.float32, device_dtype):
      hint = "what is not trained belongs to `stats`"
      if x.dtype in DEVICE_DTYPES:
        hint = f'set `device_dtype="{x.dtype}"` to compute in it'
      raise TypeError(
        f"`params` must be float32 arrays, got {core.shape_string(x)} at "
        f"{path!r}: {hint}."
      )
  likes = tuple(jax.ShapeDtypeStruct(a.shape, device_dtype) for a in likes)
  positions = treedef.unflatten(range(len(likes)))
  trees = [positions] if names is None else [positions[n] for n in names]
  flat_stages = [jax.tree.flatten(tree) for tree in trees]
  is_large = [math.prod(a.shape) >= min_leaf_size for a in likes]
  if rules is None:
    groups = _group_by_stage(
      names or ("loss",), [indices for indices, _ in flat_stages], is_large
    )
  else:
    groups = _drop_small_leaves(controllers.group_by(params, rules), is_large)
  stages = []
  for model_indices, structure in flat_stages:
    stage_groups = [groups.of_leaf[i] for i in model_indices]
    packets = []
    for group in dict.fromkeys(stage_groups):
      own = [i for i, other in enumerate(stage_groups) if other == group]
      places = tuple(model_indices[i] for i in own)
      own_likes = tuple(likes[i] for i in places)
      packets.append(Packet(group, tuple(own), places, own_likes))
    stage_likes = tuple(likes[i] for i in model_indices)
    stages.append(
      StageLayout(structure, tuple(model_indices), stage_likes, tuple(packets))
    )
  return Layout(groups, tuple(stages))


def _group_by_stage(
  names: Sequence[str],
  stage_leaves: Sequence[Sequence[int]],
  is_large: Sequence[bool],
) -> controllers.Groups:
  """Returns a group for each stage, of the leaves that are large."""
  large = {
    name: [i for i in model_indices if is_large[i]]
    for name, model_indices in zip(names, stage_leaves, strict=True)
  }
  group_names = tuple(name for name, indices in large.items() if indices)
  group = {i: k for k, n in enumerate(group_names) for i in large[n]}
  of_leaf = tuple(group.get(i) for i in range(len(is_large)))
  return controllers.Groups(group_names, of_leaf)


def _drop_small_leaves(
  groups: controllers.Groups, is_large: Sequence[bool]
) -> controllers.Groups:
  """Returns groups without their small leaves; each must keep one."""
  of_leaf = tuple(
    g if large else None
    for g, large in zip(groups.of_leaf, is_large, strict=True)
  )
  for i, name in enumerate(groups.names):
    if i not in of_leaf:
      raise ValueError(
        "`groups` must have a leaf of at least `min_leaf_size` elements each, "
        f"got {name!r}, which has none."
      )
  return controllers.Groups(groups.names, of_leaf)


def outside_jit(name: str, tree: PyTree) -> Any:
  """Returns a tree of arrays of which none is traced, or raises."""
  # A step sends arrays between backends, which no trace can do.
  core.arrays(name, tree)
  for path, x in core.named_leaves(tree):
    if isinstance(x, jax.core.Tracer):
      raise TypeError(
        f"`{name}` must be a tree of arrays outside of `jit`, got {x} at "
        f"{path!r}."
      )
  return tree


def resolve_levels(
  level: Any, groups: controllers.Groups, level_count: int
) -> tuple[int, ...]:
  """Returns the level of every group as Python ints."""
  outside_jit("level", level)
  array = np.asarray(level)
  if not np.issubdtype(array.dtype, np.integer):
    raise TypeError(
      f"`level` must be integers, got {core.shape_string(array)}."
    )
  count = len(groups.names)
  if array.shape not in ((), (count,)):
    raise ValueError(
      f"`level` must be one integer, or one for each of the {count} groups, "
      f"got {core.shape_string(array)}."
    )
  levels = tuple(np.broadcast_to(array, (count,)).tolist())
  for name, value in zip(groups.names, levels, strict=True):
    if not 0 <= value < level_count:
      raise ValueError(
        f"`level` must be in [0, {level_count - 1}], got {value} for {name!r}."
      )
  return levels
