"""Fragments of parameters, which are exchanged in turns (Streaming DiLoCo)."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core
from jaxmotion.core import PyTree

# (path, shape) of a leaf -> index of its fragment.
Parts = Callable[[str, tuple[int, ...]], int]


class Fragments(NamedTuple):
  """Division of the leaves of parameters into fragments (Streaming DiLoCo)."""

  treedef: Any
  owners: tuple[int, ...]  # Index of the fragment of each leaf.
  number: int

  def mask(self, tree: PyTree, index: int) -> PyTree:
    """Returns a tree with `optax.MaskedNode` in place of other fragments."""
    # Leaves keep their paths, by which rules choose codecs and masks choose
    # optimizers.
    if self.number == 1:
      return tree
    leaves = self.treedef.flatten_up_to(tree)
    return self.treedef.unflatten(
      [
        x if owner == index else optax.MaskedNode()
        for x, owner in zip(leaves, self.owners, strict=True)
      ]
    )

  def replace(self, tree: PyTree, fragment: PyTree) -> PyTree:
    """Returns the tree with the leaves of a fragment in their places."""
    if self.number == 1:
      return fragment
    is_masked = lambda x: isinstance(x, optax.MaskedNode)
    pairs = zip(
      self.treedef.flatten_up_to(tree),
      jax.tree.leaves(fragment, is_leaf=is_masked),
      strict=True,
    )
    return self.treedef.unflatten([x if is_masked(y) else y for x, y in pairs])


def divide_leaves(
  params: PyTree, number: int, parts: Parts | None = None
) -> Fragments:
  """Divides leaves of parameters into fragments, by `parts` or by size."""
  named = core.named_leaves(params)
  if not named:
    raise ValueError(
      f"`params` must hold at least one array, got {params!r:.200}."
    )
  if parts is None:
    # Leaves are dealt out in turns, the largest one first. So fragments are
    # of about equal size, and each has leaves of the first and last layers.
    sizes = [jnp.size(leaf) for _, leaf in named]
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    ranks = {leaf: rank for rank, leaf in enumerate(order)}
    owners = [ranks[i] % number for i in range(len(sizes))]
  else:
    owners = []
    for path, leaf in named:
      shape = tuple(jnp.shape(leaf))
      owners.append(parts(path, shape))
      name = f"parts({path!r}, {shape})"
      core.integer(0, number - 1)(name, owners[-1])
  if empty := sorted(set(range(number)) - set(owners)):
    raise ValueError(
      "`fragments` must each have a leaf of the parameters, got "
      f"{number} for {len(named)} leaves, and none in {empty}: take fewer."
    )
  return Fragments(jax.tree.structure(params), tuple(owners), number)
