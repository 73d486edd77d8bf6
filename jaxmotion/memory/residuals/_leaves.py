"""Arrays among the leaves of a tree, and the leaves that are none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jaxmotion import core
from jaxmotion.core import Array, PyTree


class Static:
  """A value that a trace sees as it is, whatever it is.

  Args:
    value: an argument at one of the positions `static_argnums`.
  """

  __slots__ = ("value",)

  def __init__(self, value: Any):
    self.value = value


class ArrayLeaves:
  """The arrays of a tree, apart from its other leaves.

  Modules hold strings, flags and functions beside their weights. These are
  constants of a trace.

  Args:
    tree: any pytree.

  Attributes:
    paths: path of each array.
    arrays: the leaves that are arrays, numbers or shapes.
  """

  def __init__(self, tree: PyTree):
    leaves, self._tree = jax.tree_util.tree_flatten_with_path(tree)
    found = [(path, x) for path, x in leaves if core.is_array(x)]
    self.paths = [path for path, _ in found]
    self.arrays = [x for _, x in found]
    # None stands where an array was: no leaf is None.
    self._others = [None if core.is_array(x) else x for _, x in leaves]

  def take_arrays(self) -> list[Array]:
    """Returns the arrays and forgets them: tracers must not outlive a trace."""
    arrays, self.arrays = self.arrays, []
    return arrays

  def fill(self, arrays: Sequence[Array]) -> Any:
    """Returns the tree with these arrays; `Static` leaves are unwrapped."""
    given = iter(arrays)
    leaves = [next(given) if x is None else x for x in self._others]
    leaves = [x.value if isinstance(x, Static) else x for x in leaves]
    return jax.tree.unflatten(self._tree, leaves)


def mark_static(
  args: Sequence[PyTree], positions: Sequence[int]
) -> tuple[PyTree, ...]:
  """Returns the arguments with those at the positions as constants."""
  static = {i + len(args) if i < 0 else i for i in positions}
  return tuple(
    Static(arg) if i in static else arg for i, arg in enumerate(args)
  )


def check_static_argnums(value: int | Sequence[int]) -> tuple[int, ...]:
  """Returns positions of arguments that are constants, checked."""
  positions = value if isinstance(value, list | tuple | range) else [value]
  for position in positions:
    core.check_int("static_argnums", position, -(2**31), 2**31 - 1)
  return tuple(positions)
