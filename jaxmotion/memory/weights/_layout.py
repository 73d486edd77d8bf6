"""Which parameters travel together, at whose level."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.codecs import Codec, identity
from jaxmotion.controllers import Groups, group_by
from jaxmotion.core import PyTree, named_leaves, shape_string

Rules = Sequence[tuple[str, str | None]]


class Packet(NamedTuple):
  """Leaves of one stage that travel under one codec.

  Attributes:
    group: whose level picks the codec; None for float32.
    leaves: positions among the stage's leaves.
  """

  group: int | None
  leaves: tuple[int, ...]


class StageLayout(NamedTuple):
  """One stage's parameters.

  Attributes:
    treedef: structure that the stage's function takes.
    leaves: positions among the model's leaves.
    likes: shape and dtype of every leaf.
    packets: together they hold every leaf once.
  """

  treedef: Any
  leaves: tuple[int, ...]
  likes: tuple[jax.ShapeDtypeStruct, ...]
  packets: tuple[Packet, ...]

  def packed(
    self, packet: Packet, ladder: Sequence[Codec], levels: Sequence[int]
  ) -> tuple[Codec, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns a packet's codec, at these levels of the ladder, and shapes."""
    group, leaves = packet
    codec = identity() if group is None else ladder[levels[group]]
    return codec, tuple(self.likes[i] for i in leaves)


class Layout(NamedTuple):
  """A model's parameters.

  Attributes:
    groups: of the leaves that are packed.
    stages: in the order they compute in.
  """

  groups: Groups
  stages: tuple[StageLayout, ...]

  def leaf_codecs(self, codec: Codec) -> tuple[Codec, ...]:
    """Returns `codec` for every leaf of a group, `identity` for the others."""
    return tuple(
      identity() if group is None else codec for group in self.groups.of_leaf
    )


def layout_of(
  params: PyTree,
  names: tuple[str, ...] | None,
  rules: Rules | None,
  min_leaf_size: int,
) -> Layout:
  """Returns the layout of a model's parameters.

  Args:
    params: {name of stage: pytree}, or one stage's pytree.
    names: of the stages; None if there is one, without a name.
    rules: as for `controllers.group_by`; None for a group a stage.
    min_leaf_size: leaves of fewer values are of no group.

  Raises:
    TypeError: a leaf is not float32.
    ValueError: the names are not those of the stages, or a rule is wrong.
  """
  if names is not None and (
    not isinstance(params, Mapping) or set(params) != set(names)
  ):
    found = sorted(params) if isinstance(params, Mapping) else type(params)
    raise ValueError(
      f"`params` must be a mapping with the stages {sorted(names)}, "
      f"got {found!r}."
    )
  likes = tuple(
    jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
    for x in jax.tree.leaves(params)
  )
  return _layout(jax.tree.structure(params), likes, names, rules, min_leaf_size)


@functools.lru_cache(maxsize=64)
def _layout(
  treedef: Any,
  likes: tuple[jax.ShapeDtypeStruct, ...],
  names: tuple[str, ...] | None,
  rules: Rules | None,
  min_leaf_size: int,
) -> Layout:
  params = treedef.unflatten(likes)
  for path, x in named_leaves(params):
    if x.dtype != jnp.float32:
      raise TypeError(
        f"`params` must be float32 arrays, got {shape_string(x)} at {path!r}: "
        "what is not trained belongs to `stats`."
      )
  positions = treedef.unflatten(range(len(likes)))
  trees = [positions] if names is None else [positions[n] for n in names]
  flat = [jax.tree.flatten(tree) for tree in trees]
  big = [math.prod(a.shape) >= min_leaf_size for a in likes]
  if rules is None:
    groups = _group_by_stage(names or ("loss",), [f for f, _ in flat], big)
  else:
    groups = _without_small(group_by(params, rules), big)
  stages = []
  for own, structure in flat:
    stage_groups = [groups.of_leaf[i] for i in own]
    packets = tuple(
      Packet(g, tuple(i for i, h in enumerate(stage_groups) if h == g))
      for g in dict.fromkeys(stage_groups)
    )
    stage_likes = tuple(likes[i] for i in own)
    stages.append(StageLayout(structure, tuple(own), stage_likes, packets))
  return Layout(groups, tuple(stages))


def _group_by_stage(
  names: Sequence[str], leaves: Sequence[Sequence[int]], big: Sequence[bool]
) -> Groups:
  of_leaf: list[int | None] = [None] * len(big)
  found: list[str] = []
  for name, own in zip(names, leaves, strict=True):
    packed = [i for i in own if big[i]]
    if packed:
      found.append(name)
    for i in packed:
      of_leaf[i] = len(found) - 1
  return Groups(tuple(found), tuple(of_leaf))


def _without_small(groups: Groups, big: Sequence[bool]) -> Groups:
  of_leaf = tuple(
    g if ok else None for g, ok in zip(groups.of_leaf, big, strict=True)
  )
  for i, name in enumerate(groups.names):
    if i not in of_leaf:
      raise ValueError(
        f"`groups` must have a leaf of at least `min_leaf_size` values each, got "
        f"{name!r}, which has none."
      )
  return Groups(groups.names, of_leaf)


def check_level(level: Any, groups: Groups, rungs: int) -> tuple[int, ...]:
  """Returns the level of every group as Python ints.

  Args:
    level: int, or an integer array with one for each group.
    groups: of the model.
    rungs: number of levels.

  Raises:
    TypeError: not integers.
    ValueError: a level out of range, or not one for each group.
  """
  array = np.asarray(level)
  if not np.issubdtype(array.dtype, np.integer):
    raise TypeError(f"`level` must be integers, got {shape_string(array)}.")
  count = len(groups.names)
  if array.shape not in ((), (count,)):
    raise ValueError(
      f"`level` must be one integer, or one for each of the {count} groups, "
      f"got {shape_string(array)}."
    )
  levels = tuple(np.broadcast_to(array, (count,)).tolist())
  for name, value in zip(groups.names, levels, strict=True):
    if not 0 <= value < rungs:
      raise ValueError(
        f"`level` must be in [0, {rungs - 1}], got {value} for {name!r}."
      )
  return levels
