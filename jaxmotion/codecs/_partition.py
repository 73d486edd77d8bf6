"""Division of trees into the arrays that codecs encode."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import core, hosts
from jaxmotion.codecs import _codec
from jaxmotion.core import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Partition:
  """A tree divided into arrays, each with its codec.

  Attributes:
    treedef: structure of the tree.
    leaves: path and shape of every leaf.
    leaf_groups: the leaves that make up each array, and its codec.
  """

  treedef: Any
  leaves: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
  leaf_groups: tuple[_codec.LeafGroup, ...]

  @property
  def codecs(self) -> list[_codec.Codec]:
    """The codec of every array."""
    return [group.codec for group in self.leaf_groups]

  def array_likes(self) -> list[jax.ShapeDtypeStruct]:
    """Returns the shape and dtype of every array."""
    likes = []
    for group in self.leaf_groups:
      own = [self.leaves[i][1] for i in group.leaves]
      if len(own) > 1:
        size = sum(math.prod(a.shape) for a in own)
        own = [jax.ShapeDtypeStruct((size,), own[0].dtype)]
      likes += own
    return likes

  @core.declare(key=core.optional_key)
  def array_keys(self, key: core.Key | None) -> list[core.Key | None]:
    """Returns a key for each array, derived from the paths of its leaves."""
    groups = self.leaf_groups
    if key is None or not any([codec.needs_key for codec in self.codecs]):
      return [None] * len(groups)
    paths = [",".join(self.leaves[i][0] for i in g.leaves) for g in groups]
    return [*fold_paths(key, paths)]

  def split(self, tree: PyTree) -> list[Array]:
    """Returns the arrays of a tree of this structure."""
    likes = self.treedef.unflatten([like for _, like in self.leaves])
    core.check_like("tree", tree, likes, "`partition`")
    leaves = self.treedef.flatten_up_to(tree)
    arrays = []
    for group in self.leaf_groups:
      own = [leaves[i] for i in group.leaves]
      if len(own) > 1:
        own = [jnp.concatenate([a.reshape(-1) for a in own])]
      arrays += own
    return arrays

  @core.declare(arrays=core.sequence("arrays"))
  def merge(self, arrays: Sequence[Array]) -> PyTree:
    """Returns the tree of these arrays: inverts `split`."""
    self._check_merged(arrays)
    leaves: list[Any] = [None] * len(self.leaves)
    for group, array in zip(self.leaf_groups, arrays, strict=True):
      if len(group.leaves) == 1:
        leaves[group.leaves[0]] = array
        continue
      likes = [self.leaves[i][1] for i in group.leaves]
      ends = np.cumsum([math.prod(a.shape) for a in likes])
      pieces = jnp.split(array, ends[:-1])
      for i, piece, leaf in zip(group.leaves, pieces, likes, strict=True):
        leaves[i] = piece.reshape(leaf.shape)
    return self.treedef.unflatten(leaves)

  def _check_merged(self, arrays: Sequence[Any]) -> None:
    """Raises unless arrays are those that the tree is divided into."""
    likes = self.array_likes()
    if len(arrays) != len(likes):
      raise ValueError(
        f"`arrays` must be {len(likes)} arrays, got {len(arrays)}."
      )
    for i, (x, like) in enumerate(zip(arrays, likes, strict=True)):
      if getattr(x, "shape", None) != like.shape:
        raise ValueError(
          f"`arrays[{i}]` must be like {core.shape_string(like)}, got "
          f"{x!r:.200}."
        )


@core.declare(
  codec=core.instance(_codec.Codec, "a codec"), tree=core.typed_arrays
)
def partition(codec: _codec.Codec, tree: PyTree) -> Partition:
  """Divides a tree into the arrays that `codec` encodes.

  Args:
    codec: any codec, or a tree codec such as `rules` and `buckets`.
    tree: pytree of floating-point arrays or ShapeDtypeStructs.

  Raises:
    TypeError: a leaf is not a floating-point array; it is named by its path.

  Example:
    >>> from jaxmotion import codecs
    >>> tree = {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)}
    >>> codec = codecs.buckets(codecs.identity(), max_leaf_size=8)
    >>> [like.shape for like in partition(codec, tree).array_likes()]
    [(9,)]
  """
  leaves, treedef = jax.tree.flatten(tree)
  return _partition_shapes(codec, treedef, tuple(map(core.shape_dtype, leaves)))


@functools.lru_cache(maxsize=1024)
def _partition_shapes(
  codec: _codec.Codec, treedef: Any, likes: tuple[jax.ShapeDtypeStruct, ...]
) -> Partition:
  """Divides a tree of shapes, once for each codec and structure."""
  # A step is traced several times, and rules match every path.
  tree = treedef.unflatten(likes)
  leaves = core.named_leaves(tree)
  for path, like in leaves:
    core.float_array(path, like)
  groups = tuple(codec.leaf_groups(leaves))
  # In a part of a tree, as `optax.masked` makes it, rules may be for leaves
  # that it lacks.
  if not core.find_nodes(tree, optax.MaskedNode):
    codec._check_paths([path for path, _ in leaves])
  return Partition(treedef, tuple(leaves), groups)


def fold_paths(key: core.Key, paths: Sequence[str]) -> list[core.Key]:
  """Returns the key of each leaf: `key.fold_path(path)`.

  All are computed in one array operation: on a GPU, each by itself would launch
  kernels of its own. On CPU they are written to memory: LLVM takes time that is
  exponential in the depth of hashes that it compiles into a loop.

  Args:
    key: key of the tree.
    paths: path of each leaf.

  >>> key = core.make_key(0)
  >>> fold_paths(key, ["a", "b"])[1] == key.fold_path("b")
  True
  """
  if not paths:
    return []
  words = np.array([zlib.crc32(p.encode()) for p in paths], np.uint32)
  shared, worker = hosts.write_apart(core.Key.fold, key, words)
  return list(map(core.Key, jnp.unstack(shared), jnp.unstack(worker)))
