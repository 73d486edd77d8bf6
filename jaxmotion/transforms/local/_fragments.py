"""Division of parameters into fragments that are exchanged one by one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core
from jaxmotion.core import PyTree

Parts = Callable[[str, tuple[int, ...]], int]


class Fragments(NamedTuple):
  """The fragment of every leaf of a tree.

  Attributes:
    owners: index of the fragment of each leaf.
    number: number of fragments.
  """

  treedef: Any
  owners: tuple[int, ...]
  number: int

  def mask(self, tree: PyTree, index: int) -> PyTree:
    """Returns the tree with `optax.MaskedNode` for leaves of other
    fragments."""
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
  params: PyTree, count: int, parts: Parts | None = None
) -> Fragments:
  """Divides the leaves of a tree into fragments."""
  # parts: (path, shape) -> index of the fragment.
  named = core.named_leaves(params)
  if not named:
    raise ValueError(
      f"`params` must hold at least one array, got {params!r:.200}."
    )
  if parts is None:
    # The largest leaf goes to fragment 0, the next one to fragment 1, and so on
    # in turns. So fragments are of about equal size, and each has leaves of the
    # first and of the last layers.
    sizes = [jnp.size(leaf) for _, leaf in named]
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    ranks = {leaf: rank for rank, leaf in enumerate(order)}
    owners = [ranks[i] % count for i in range(len(sizes))]
  else:
    owners = []
    for path, leaf in named:
      index = parts(path, tuple(jnp.shape(leaf)))
      wanted = f"an index of the {count} fragments"
      if isinstance(index, bool) or not isinstance(index, int):
        raise TypeError(
          f"`parts` must return {wanted}, got {index!r} for {path!r}."
        )
      if not 0 <= index < count:
        raise ValueError(
          f"`parts` must return {wanted}, got {index} for {path!r}."
        )
      owners.append(index)
  if empty := sorted(set(range(count)) - set(owners)):
    raise ValueError(
      f"`fragments` must each have a leaf of the parameters, got {count} for "
      f"{len(named)} leaves, and none in {empty}: take fewer, or choose by "
      "`parts`."
    )
  return Fragments(jax.tree.structure(params), tuple(owners), count)
