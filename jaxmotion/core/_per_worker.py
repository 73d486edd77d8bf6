"""Marker of optimizer state that differs between workers, and its specs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxmotion.core import _checks, _compat, _shared, _split, _types


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

  value: _types.PyTree


def pack_worker(tree: _types.PyTree) -> PerWorker:
  """Marks one worker's own state: adds the leading axis of length 1."""
  return PerWorker(jax.tree.map(lambda a: jnp.expand_dims(a, 0), tree))


def unpack_worker(state: PerWorker) -> _types.PyTree:
  """Returns one worker's own state, without the leading axis.

  Raises:
    ValueError: a leading axis is not 1, so this is not one worker's view.

  >>> unpack_worker(pack_worker({"e": jnp.zeros(3)}))["e"].shape
  (3,)
  """

  def squeeze_leaf(a: Any) -> Any:
    if a.ndim == 0 or a.shape[0] != 1:
      raise ValueError(
        "`state` must be one worker's view with a leading axis of 1: pass "
        "per-worker state into shard_map with the specs that "
        "`jaxmotion.state_specs` returns, and continue that of another number "
        "of workers by `jaxmotion.checkpoint.resize`, got shape "
        f"{a.shape}."
      )
    return jnp.squeeze(a, 0)

  return jax.tree.map(squeeze_leaf, state.value)


def state_specs(
  state: _types.PyTree, axis_name: _types.AxisName
) -> _types.PyTree:
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

  _checks.check_axis_name("axis_name", axis_name)
  _checks.check_arrays("state", state)

  def spec_shared(node: _shared.Shared) -> Any:
    others = tuple(
      n for n in _compat.axis_names(axis_name) if n not in node.axes
    )
    spec = PartitionSpec(others) if others else PartitionSpec()
    return jax.tree.map(lambda _: spec, node)

  def spec_of(node: Any) -> Any:
    if isinstance(node, PerWorker):
      own = PartitionSpec(axis_name)
      return PerWorker(
        _shared.map_shared(lambda _: own, spec_shared, node.value)
      )
    if isinstance(node, _split.Split):
      return node.specs({*node.axes, *_compat.axis_names(axis_name)})
    return PartitionSpec()

  return jax.tree.map(
    spec_of, state, is_leaf=lambda n: isinstance(n, PerWorker | _split.Split)
  )
