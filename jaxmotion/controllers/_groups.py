"""Groups of parameters that share a level, and their norms."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, PyTree


@dataclasses.dataclass(frozen=True)
@core.declare(
  names=core.sequence("strings", core.text),
  of_leaf=core.sequence("integers and None"),
)
class Groups:
  """Groups of leaves of a tree; the leaves of a group share a level.

  Attributes:
    names: names of the groups, in the order of their first leaves.
    of_leaf: position of each leaf's group, in the order of `tree.flatten`;
      None for a leaf of no group.

  Example:
    >>> groups = Groups(names=("body", "head"), of_leaf=(0, 0, 1))
    >>> groups.split({"a": 1, "b": 2, "c": 3})
    [[1, 2], [3]]
  """

  names: tuple[str, ...]
  of_leaf: tuple[int | None, ...]

  def __post_init__(self) -> None:
    names, of_leaf = self.names, self.of_leaf
    group = core.optional(core.integer(0, len(names) - 1))
    core.sequence("integers and None", group)("of_leaf", of_leaf)
    if len(set(names)) < len(names):
      raise ValueError(f"`names` must be given once each, got {names}.")
    if len(set(of_leaf) - {None}) < len(names):
      raise ValueError(
        f"`of_leaf` must have a leaf of each of the {len(names)} groups, got"
        f" {of_leaf}."
      )

  def split(self, tree: PyTree) -> list[list[Any]]:
    """Returns the leaves of every group.

    Args:
      tree: pytree of the structure that was grouped.

    Raises:
      ValueError: the tree has another number of leaves.
    """
    parts: list[list[Any]] = [[] for _ in self.names]
    for leaf, group in zip(self._check_leaves(tree), self.of_leaf, strict=True):
      if group is not None:
        parts[group].append(leaf)
    return parts

  @core.declare(parts=core.sequence("lists", core.sequence("leaves")))
  def merge(self, parts: Sequence[Sequence[Any]], tree: PyTree) -> PyTree:
    """Returns the tree with these leaves of the groups; inverts `split`.

    Args:
      parts: the leaves of every group.
      tree: pytree of the same structure, whose leaves that are in no group are
        taken.
    """
    wanted = [self.of_leaf.count(group) for group in range(len(self.names))]
    if [len(part) for part in parts] != wanted:
      raise ValueError(
        f"`parts` must have {wanted} leaves by group, got"
        f" {[len(part) for part in parts]}."
      )
    remaining = [iter(part) for part in parts]
    leaves = [
      leaf if group is None else next(remaining[group])
      for leaf, group in zip(
        self._check_leaves(tree), self.of_leaf, strict=True
      )
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)

  def _check_leaves(self, tree: PyTree, name: str = "tree") -> list[Any]:
    """Returns the leaves; raises unless there are as many as were grouped."""
    leaves = jax.tree.leaves(tree)
    if len(leaves) != len(self.of_leaf):
      raise ValueError(
        f"`{name}` must have the {len(self.of_leaf)} leaves that were grouped, "
        f"got {len(leaves)}."
      )
    return leaves


@core.declare(
  params=core.arrays, rules=core.sequence("pairs of a pattern and a name")
)
def group_by(params: PyTree, rules: Sequence[tuple[str, str | None]]) -> Groups:
  r"""Groups the leaves of a tree by their paths.

  Args:
    params: pytree of arrays or ShapeDtypeStructs.
    rules: pairs of a regular expression, searched for in a leaf's path
      ("block1/conv/kernel"), and the name of its group. There `\1` stands for
      what the first bracket matched. None puts the leaf in no group. The first
      expression that matches wins. `("(.*)/", r"\1")` makes a group of every
      layer, `("(block\d+)/", r"\1")` of every building block.

  Returns:
    The groups.

  Raises:
    ValueError: an expression matches no leaf, a leaf matches none, no leaf is
      in a group, or an expression is none.

  Example:
    >>> params = {
    ...   "conv1": {"bias": jnp.zeros(2), "kernel": jnp.zeros((3, 2))},
    ...   "conv2": {"bias": jnp.zeros(2), "kernel": jnp.zeros((2, 2))},
    ... }
    >>> group_by(params, [("bias", None), ("(.*)/", r"\1")])
    Groups(names=('conv1', 'conv2'), of_leaf=(None, 0, None, 1))
  """
  path_rules = core.PathRules(rules, value="name")
  paths = [path for path, _ in core.named_leaves(params)]
  path_rules.require_use(paths)
  names: dict[str, int] = {}
  of_leaf: list[int | None] = []
  for path in paths:
    match = path_rules.require_match(path, "('', None)")
    name = None if match.value is None else match.found.expand(match.value)
    of_leaf.append(None if name is None else names.setdefault(name, len(names)))
  if not names:
    raise ValueError(f"`rules` must put a leaf in a group, got {rules!r}.")
  return Groups(tuple(names), tuple(of_leaf))


@core.declare(
  groups=core.instance(Groups, "what `group_by` returned"), params=core.arrays
)
def group_norms(params: PyTree, groups: Groups) -> Array:
  r"""Returns the Euclidean norm of every group's elements.

  Every element is read once; sums are made in float32.

  Args:
    params: pytree of arrays of the structure that was grouped.
    groups: what `group_by` returned.

  Returns:
    float32[groups].

  Raises:
    ValueError: the tree has another number of leaves.

  Example:
    >>> params = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([2.0])}
    >>> group_norms(params, group_by(params, [("(.*)", r"\1")])).tolist()
    [5.0, 2.0]
  """
  groups._check_leaves(params, "params")
  totals = [
    sum(jnp.sum(jnp.square(jnp.asarray(x, jnp.float32))) for x in leaves)
    for leaves in groups.split(params)
  ]
  return jnp.sqrt(jnp.stack(totals))
