"""Marker of arrays, in per-worker state, that are equal on all workers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxmotion.core import _compat, _types


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared:
  """Part of a codec's state that has the same bits on all workers.

  A codec makes it from replies of other workers. A result that is made from it
  may then be equal on all workers, which types of arrays record. Other state is
  each worker's own, even where it happens to be equal.

  Attributes:
    value: pytree of arrays.
    axes: mesh axes of the workers that hold the same. A codec leaves them out;
      the collective that keeps the state fills them in.

  Example:
    >>> from jaxmotion import PerWorker, state_specs
    >>> state = PerWorker(Shared(jnp.zeros((1, 3)), axes=("data",)))
    >>> state_specs(state, "data").value.value  # there once for all workers
    P()
  """

  value: _types.PyTree
  axes: tuple[str, ...] = dataclasses.field(
    default=(), metadata={"static": True}
  )


def map_shared(
  own: Callable[[Any], Any],
  shared: Callable[[Shared], Any],
  tree: _types.PyTree,
) -> _types.PyTree:
  """Maps the leaves of a state, and the `Shared` parts of it as a whole.

  Args:
    own: leaf -> leaf, for arrays outside of `Shared`.
    shared: Shared -> subtree.
    tree: state of a codec, or a list of states.
  """
  return jax.tree.map(
    lambda node: shared(node) if isinstance(node, Shared) else own(node),
    tree,
    is_leaf=lambda node: isinstance(node, Shared),
  )


def drop_shared(tree: _types.PyTree) -> _types.PyTree:
  """Returns a state whose `Shared` parts hold nothing."""
  return map_shared(lambda a: a, lambda node: Shared((), node.axes), tree)


def shared_parts(tree: _types.PyTree) -> list[Shared]:
  """Returns the `Shared` parts of a state, in the order of its leaves."""
  found: list[Shared] = []
  map_shared(lambda a: a, lambda node: found.append(node), tree)
  return found


def name_axes(tree: _types.PyTree, axis_name: _types.AxisName) -> _types.PyTree:
  """Returns a state whose `Shared` parts name the axes of their workers.

  Args:
    tree: state that a codec made.
    axis_name: axes of the workers, for parts that do not name theirs.
  """
  return map_shared(
    lambda a: a,
    lambda node: Shared(node.value, node.axes or _compat.axis_names(axis_name)),
    tree,
  )


def settle_state(
  tree: _types.PyTree, axis_name: _types.AxisName
) -> _types.PyTree:
  """Types state as each worker's own, and its `Shared` parts as equal.

  Types of a state must not depend on how it was made, or branches and loops
  would get two types.

  Args:
    tree: state of a codec, or a list of states.
    axis_name: a bound axis of the workers, or several.

  Raises:
    ValueError: a `Shared` part is typed as different on the workers.
  """
  axes = _compat.axis_names(axis_name)

  def settle_shared(node: Shared) -> Shared:
    for leaf in jax.tree.leaves(node.value):
      if _compat.is_varying(leaf, node.axes):
        raise ValueError(
          "`state` must be made of replies and of shared state where it is "
          f"`Shared`, got {jax.typeof(leaf)}, which depends on what one worker "
          "has alone."
        )
    others = tuple(name for name in axes if name not in node.axes)
    value = _compat.to_varying(node.value, others) if others else node.value
    return Shared(value, node.axes)

  tree = name_axes(tree, axes)
  return map_shared(lambda a: _compat.to_varying(a, axes), settle_shared, tree)
