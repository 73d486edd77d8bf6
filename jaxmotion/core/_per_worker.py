"""Markers of state that differs between workers, is cut, or is equal on all."""

import dataclasses
import itertools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from jaxmotion.core import _checks, _compat, _tree


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

  value: _tree.PyTree
  axes: tuple[str, ...] = dataclasses.field(
    default=(), metadata={"static": True}
  )


def map_shared(
  shared: Callable[[Shared], Any],
  tree: _tree.PyTree,
  own: Callable[[Any], Any] = lambda leaf: leaf,
) -> _tree.PyTree:
  """Maps the `Shared` parts of a state as a whole, and all other leaves."""
  # shared: Shared -> subtree; own: leaf -> leaf, outside of `Shared`.
  return jax.tree.map(
    lambda node: shared(node) if isinstance(node, Shared) else own(node),
    tree,
    is_leaf=lambda node: isinstance(node, Shared),
  )


def drop_shared(tree: _tree.PyTree) -> _tree.PyTree:
  """Returns a state whose `Shared` parts hold nothing."""
  return map_shared(lambda node: Shared((), node.axes), tree)


def shared_parts(tree: _tree.PyTree) -> list[Shared]:
  """Returns the `Shared` parts of a state, in the order of its leaves."""
  return _tree.find_nodes(tree, Shared)


def name_axes(tree: _tree.PyTree, axis_name: _tree.AxisName) -> _tree.PyTree:
  """Returns a state whose `Shared` parts name the axes of their workers."""
  names = _tree.axis_names(axis_name)
  # Parts that name their axes keep them.
  return map_shared(lambda node: Shared(node.value, node.axes or names), tree)


def settle_state(tree: _tree.PyTree, axis_name: _tree.AxisName) -> _tree.PyTree:
  """Types state as varying over workers, and its `Shared` parts as equal."""
  # Types of a state must not depend on how it was made, or branches and loops
  # would get two types.
  axes = _tree.axis_names(axis_name)

  def settle_shared(node: Shared) -> Shared:
    """Types a part as equal on its axes; raises if it varies over them."""
    for leaf in jax.tree.leaves(node.value):
      if _compat.is_varying(leaf, node.axes):
        raise ValueError(
          "`state` must be made of replies and of shared state where it is "
          f"`Shared`, got {jax.typeof(leaf)}, which depends on what one worker "
          "has alone."
        )
    others = tuple(name for name in axes if name not in node.axes)
    return Shared(_compat.to_varying(node.value, others), node.axes)

  tree = name_axes(tree, axes)
  return map_shared(settle_shared, tree, lambda a: _compat.to_varying(a, axes))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Split:
  """Arrays that are cut between the workers, such as sharded moments.

  Outside of `shard_map` every leaf is one ordinary array, sharded along one of
  its dimensions; inside, a leaf is this worker's part of it.

  Attributes:
    value: pytree of arrays.
    dimensions: for each leaf the dimension that is cut, or None for a leaf
      that all workers hold whole.
    axes: mesh axes that the dimensions are cut along, the major one first.
    shards: for each leaf its partition spec over other axes of the mesh, those
      of the model; empty if there are none.

  Example:
    >>> moments = Split(jnp.zeros((8, 3)), dimensions=(0,), axes=("data",))
    >>> moments.specs().value
    P('data',)
  """

  value: _tree.PyTree
  dimensions: tuple[int | None, ...] = dataclasses.field(
    metadata={"static": True}
  )
  axes: tuple[str, ...] = dataclasses.field(metadata={"static": True})
  shards: tuple[PartitionSpec, ...] = dataclasses.field(
    default=(), metadata={"static": True}
  )

  def specs(self, axes: Collection[str] | None = None) -> "Split":
    """Returns the partition spec of every leaf, in the same structure.

    Args:
      axes: axes of the mesh that specs may name; None is all.
    """

    def spec_of(dimension: int | None, shard: PartitionSpec) -> PartitionSpec:
      """Returns the spec of one leaf, without axes that may not be named."""
      entries = list(map(_compat.spec_axes, shard))
      if dimension is not None:
        entries += [()] * (dimension + 1 - len(entries))
        # Workers are major: what is one of them holds a contiguous part.
        entries[dimension] = (*self.axes, *entries[dimension])
      kept = [
        tuple(n for n in entry if axes is None or n in axes)
        for entry in entries
      ]
      while kept and not kept[-1]:
        kept.pop()
      return PartitionSpec(*(entry or None for entry in kept))

    treedef: Any = jax.tree.structure(self)
    shards = self.shards or (PartitionSpec(),) * len(self.dimensions)
    pairs = zip(self.dimensions, shards, strict=True)
    return treedef.unflatten(itertools.starmap(spec_of, pairs))


class PerWorker(NamedTuple):
  """State of which every worker has its own, such as error memory.

  Every leaf has a leading axis of workers: `(workers, ...)` as seen from
  outside `shard_map`, where its spec is `P(axis)`, and `(1, ...)` inside. Parts
  that are marked as `Shared` are there once for all workers: `(1, ...)` outside
  as well, where their spec is `P()`.

  Attributes:
    value: pytree of arrays.

  Example:
    >>> from jaxmotion import state_specs
    >>> state = PerWorker({"memory": jnp.zeros((4, 3))})  # of four workers
    >>> state_specs(state, "data").value["memory"]
    P('data',)
  """

  value: _tree.PyTree


def is_marked(node: Any) -> bool:
  """Says whether a node of a state holds what each worker has of its own."""
  return isinstance(node, PerWorker | Split)


def pack_worker(tree: _tree.PyTree) -> PerWorker:
  """Marks one worker's own state: adds the leading axis of length 1."""
  return PerWorker(jax.tree.map(lambda a: lax.expand_dims(a, (0,)), tree))


def unpack_worker(state: PerWorker) -> _tree.PyTree:
  """Returns one worker's own state, without the leading axis."""

  def squeeze_leaf(a: Any) -> Any:
    """Drops the leading axis of a leaf, or raises unless its length is 1."""
    if a.ndim == 0 or a.shape[0] != 1:
      raise ValueError(
        "`state` must be one worker's view with a leading axis of 1: pass "
        "per-worker state into shard_map with the specs that "
        "`jaxmotion.state_specs` returns, and continue that of another number "
        "of workers by `jaxmotion.checkpoint.resize`, got shape "
        f"{a.shape}."
      )
    return lax.squeeze(a, (0,))

  return jax.tree.map(squeeze_leaf, state.value)


@_checks.declare(state=_checks.arrays, axis_name=_tree.worker_axes)
def state_specs(state: _tree.PyTree, axis_name: _tree.AxisName) -> _tree.PyTree:
  """Returns the partition spec of every leaf of an optimizer state.

  Args:
    state: a state (or its shapes) as `tx.init` returns it.
    axis_name: the mesh axis (or axes) of the workers.

  Returns:
    The same structure, for `in_specs` and `out_specs` of `shard_map`. Leaves
    that differ between workers have `P(axis_name)`, and leaves that all workers
    share have `P()`. A `Split` leaf names the dimension that is cut. Axes of a
    model that `Split` leaves are sharded over are named if `axis_name` names
    them too.

  Raises:
    TypeError: `axis_name` is no name, or a leaf of `state` no array.

  Example:
    >>> state = {"count": jnp.zeros(()), "e": PerWorker(jnp.zeros((4, 3)))}
    >>> specs = state_specs(state, "data")
    >>> specs["count"] == PartitionSpec(), specs["e"].value[0]
    (True, 'data')
  """
  names = _tree.axis_names(axis_name)

  def spec_shared(node: Shared) -> Any:
    # The workers along its axes hold the same rows, so only others cut them.
    others = tuple(name for name in names if name not in node.axes)
    spec = PartitionSpec(others) if others else PartitionSpec()
    return jax.tree.map(lambda _: spec, node)

  def spec_of(node: Any) -> Any:
    """Returns the spec of a leaf, or those of what a marker holds."""
    if isinstance(node, PerWorker):
      own = PartitionSpec(axis_name)
      return PerWorker(map_shared(spec_shared, node.value, lambda _: own))
    if isinstance(node, Split):
      # A map over the workers alone must not name axes of a model.
      return node.specs({*node.axes, *names})
    return PartitionSpec()

  return jax.tree.map(spec_of, state, is_leaf=is_marked)
