"""Paths, structure and bytes of the leaves of a tree."""

import math
from typing import Any

import jax

from jaxmotion.core import _types


def leaf_path(key_path: Any) -> str:
  """Returns a leaf's key path as a string such as `a/b/0`.

  Keys, attributes and positions are joined by slashes. A last attribute `value`
  is left out: it is that of the box that flax puts around an array
  (`nnx.Variable`, `nn.Partitioned`). So a kernel ends in `kernel` whatever
  library holds it.

  >>> [(path, _)] = jax.tree.leaves_with_path({"dense": [1.0]})
  >>> leaf_path(path)
  'dense/0'
  """
  if key_path and key_path[-1] == jax.tree_util.GetAttrKey("value"):
    key_path = key_path[:-1]
  return jax.tree_util.keystr(key_path, simple=True, separator="/")


def same_structure(a: _types.PyTree, b: _types.PyTree) -> bool:
  """Returns whether two trees have the same structure.

  >>> same_structure([1, (2,)], [3, (4,)]), same_structure([1], (1,))
  (True, False)
  """
  one: Any = jax.tree.structure(a)
  return one == jax.tree.structure(b)


def named_leaves(tree: _types.PyTree) -> list[tuple[str, Any]]:
  """Returns (path, leaf) for every leaf, in the order of `tree.flatten`.

  >>> named_leaves({"b": 1.0, "a": [2.0]})
  [('a/0', 2.0), ('b', 1.0)]
  """
  return [(leaf_path(p), x) for p, x in jax.tree.leaves_with_path(tree)]


def tree_bytes(tree: _types.PyTree) -> int:
  """Returns the bytes of all arrays (or shapes with a dtype) of a tree.

  >>> tree_bytes([jax.ShapeDtypeStruct((2, 3), "float32"), None])
  24
  """
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(a.shape) * int(a.dtype.itemsize) for a in leaves)
