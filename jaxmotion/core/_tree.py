"""Types of the library, and paths, structure and bytes of trees."""

import math
import sys
from typing import Any, TypeAlias

import jax

Array: TypeAlias = jax.Array
# An array or a jax.ShapeDtypeStruct: only `.shape` and `.dtype` are read.
ShapedLike: TypeAlias = Any
PyTree: TypeAlias = Any


def shape_dtype(x: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape and dtype of `x`, without its data."""
  return jax.ShapeDtypeStruct(x.shape, x.dtype)


def leaf_path(key_path: Any) -> str:
  """Returns a leaf's key path as a string such as `a/b/0`."""
  # A last attribute `value` is that of the box that flax puts around an array
  # (`nnx.Variable`, `nn.Partitioned`). Without it a kernel ends in `kernel`
  # whatever library holds it.
  if key_path and key_path[-1] == jax.tree_util.GetAttrKey("value"):
    key_path = key_path[:-1]
  return jax.tree_util.keystr(key_path, simple=True, separator="/")


def same_structure(a: PyTree, b: PyTree) -> bool:
  """Returns whether two trees have the same structure.

  >>> same_structure([1, (2,)], [3, (4,)]), same_structure([1], (1,))
  (True, False)
  """
  one: Any = jax.tree.structure(a)
  return one == jax.tree.structure(b)


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
  """Returns (path, leaf) for every leaf, in the order of `tree.flatten`."""
  return [(leaf_path(p), x) for p, x in jax.tree.leaves_with_path(tree)]


def tree_bytes(tree: PyTree) -> int:
  """Returns the bytes of all arrays (or shapes with a dtype) of a tree.

  >>> tree_bytes([jax.ShapeDtypeStruct((2, 3), "float32"), None])
  24
  """
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(a.shape) * int(a.dtype.itemsize) for a in leaves)


def know_in_flax(cls: type) -> None:
  """Lets flax's serialization pass by a class whose objects hold no arrays."""
  # Its file holds what a class says of itself, and refuses classes that it does
  # not know. A program that uses it has loaded it before it makes a state.
  serialization = sys.modules.get("flax.serialization")
  if serialization is not None:
    serialization.register_serialization_state(
      cls, lambda node: {}, lambda node, _: node, override=True
    )
