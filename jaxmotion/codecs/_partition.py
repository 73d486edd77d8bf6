"""How a tree is cut into the arrays that are encoded."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.codecs._codec import Codec, LeafGroup
from jaxmotion.core import (
  Array,
  Key,
  PyTree,
  ShapedLike,
  check_float,
  named_leaves,
  shape_dtype as like_of,
)


@dataclasses.dataclass(frozen=True)
class Partition:
  """A tree cut into arrays, each with its codec.

  Attributes:
    treedef: structure of the tree.
    leaves: path and shape of every leaf.
    leaf_groups: which leaves make up each array, and its codec.
  """

  treedef: Any
  leaves: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
  leaf_groups: tuple[LeafGroup, ...]

  def likes(self) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of every array."""
    return [self._like(part) for part in self.leaf_groups]

  def keys(self, key: Key | None) -> list[Key | None]:
    """Returns each array's own key, from the paths of its leaves."""
    if key is None:
      return [None] * len(self.leaf_groups)
    return [
      key.fold_path(",".join(self.leaves[i][0] for i in part.leaves))
      for part in self.leaf_groups
    ]

  def split(self, tree: PyTree) -> list[Array]:
    """Returns the arrays of a tree of this structure."""
    leaves = self.treedef.flatten_up_to(tree)
    return [self._join([leaves[i] for i in p.leaves]) for p in self.leaf_groups]

  def merge(self, arrays: Sequence[Array]) -> PyTree:
    """Inverts `split`."""
    leaves: list[Any] = [None] * len(self.leaves)
    for part, array in zip(self.leaf_groups, arrays, strict=True):
      if len(part.leaves) == 1:
        leaves[part.leaves[0]] = array
        continue
      likes = [self.leaves[i][1] for i in part.leaves]
      ends = np.cumsum([math.prod(a.shape) for a in likes])
      pieces = jnp.split(array, ends[:-1])
      for i, piece, leaf in zip(part.leaves, pieces, likes, strict=True):
        leaves[i] = piece.reshape(leaf.shape)
    return self.treedef.unflatten(leaves)

  def _like(self, part: LeafGroup) -> jax.ShapeDtypeStruct:
    likes = [self.leaves[i][1] for i in part.leaves]
    if len(likes) == 1:
      return likes[0]
    size = sum(math.prod(a.shape) for a in likes)
    return jax.ShapeDtypeStruct((size,), likes[0].dtype)

  def _join(self, arrays: list[Array]) -> Array:
    if len(arrays) == 1:
      return arrays[0]
    return jnp.concatenate([a.reshape(-1) for a in arrays])


def partition(codec: Codec, tree: PyTree) -> Partition:
  """Cuts a tree into the arrays that `codec` encodes.

  Args:
    codec: any codec, or a tree codec such as `rules` and `buckets`.
    tree: pytree of floating-point arrays or ShapeDtypeStructs.

  Raises:
    TypeError: a leaf is not a floating-point array; it is named by its path.

  Example:
    >>> from jaxmotion import codecs
    >>> tree = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
    >>> cut = partition(codecs.buckets(codecs.identity(), small=8), tree)
    >>> [like.shape for like in cut.likes()]
    [(9,)]
  """
  leaves = []
  for path, x in named_leaves(tree):
    check_float(path, x)
    leaves.append((path, like_of(x)))
  parts = tuple(codec.leaf_groups(leaves))
  return Partition(jax.tree.structure(tree), tuple(leaves), parts)


class TreeCodec(Codec):
  """A codec of whole trees: it says which codec encodes which leaf."""

  @property
  def is_tree(self) -> bool:
    """Whether it encodes trees rather than arrays."""
    return True

  def leaf_groups(
    self, leaves: Sequence[tuple[str, ShapedLike]]
  ) -> list[LeafGroup]:
    """Says which arrays the tree is encoded as."""
    raise NotImplementedError

  def init(self, like: PyTree) -> PyTree:
    """Returns a list with the state of every array."""
    cut = partition(self, like)
    return [
      p.codec.init(a) for p, a in zip(cut.leaf_groups, cut.likes(), strict=True)
    ]

  def encode(
    self, x: PyTree, state: PyTree = (), key: Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Returns lists with the payload and the state of every array."""
    cut = partition(self, x)
    states = state if len(state) else [()] * len(cut.leaf_groups)
    coded = [
      part.codec.encode(array, s, k)
      for part, array, s, k in zip(
        cut.leaf_groups, cut.split(x), states, cut.keys(key), strict=True
      )
    ]
    return [p for p, _ in coded], [s for _, s in coded]

  def decode(self, payload: PyTree, like: PyTree) -> PyTree:
    """Decodes a list of payloads to a tree like `like`."""
    cut = partition(self, like)
    arrays = [
      part.codec.decode(p, a)
      for part, p, a in zip(cut.leaf_groups, payload, cut.likes(), strict=True)
    ]
    return cut.merge(arrays)
