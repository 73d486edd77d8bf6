"""Shapes of a chain's state, and the exchanges inside of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import (
  _exchange_state,
  _init_state,
  _sharded_update,
  _shardings,
  _state_maker,
)


class TracedState(NamedTuple):
  """State of a chain, without its arrays.

  Attributes:
    state: ShapeDtypeStructs of the whole state; per-worker leaves have a
      leading axis of all workers.
    exchanges: options of each exchange, in the order of their states.
  """

  state: PyTree
  exchanges: list[_exchange_state.Options]


def trace_state(
  tx: optax.GradientTransformation | Callable[..., Any],
  params: PyTree,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: PyTree | None = None,
) -> TracedState:
  """Returns the shapes of a state and the exchanges it belongs to.

  Args:
    tx: optax chain, or the `init` that a builder returned.
    params: parameters or their shapes.
    mesh: mesh that has the axis; without devices, to ask about other numbers
      of workers.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes, as `data_parallel` takes
      it; None: they are not.

  Raises:
    ValueError: a transformation in `tx` changes the states of exchanges inside
      of it.
  """
  init = _state_maker.find_maker(tx).init
  core.check_arrays("params", params, numbers=False)
  core.check_instance(
    "mesh", mesh, (Mesh, AbstractMesh), "a mesh of jax.sharding"
  )
  core.check_axis_name("axis_name", axis_name)
  _init_state.check_axes(mesh, axis_name)
  found: list[TracedState] = []
  params = jax.tree.map(core.shape_dtype, params)

  def is_state(node: Any) -> bool:
    return isinstance(
      node, _exchange_state.ExchangeState | _sharded_update.ShardedState
    )

  def trace_init(params: PyTree) -> jax.Array:
    token = _exchange_state.initialized_exchanges.set([])
    try:
      state = init(params)
      notes = {
        id(node): options
        for node, options in _exchange_state.initialized_exchanges.get() or ()
      }
    finally:
      _exchange_state.initialized_exchanges.reset(token)
    nodes = [n for n in jax.tree.leaves(state, is_leaf=is_state) if is_state(n)]
    if missing := [node for node in nodes if id(node) not in notes]:
      raise ValueError(
        "`tx` must keep the states of its exchanges as they are, got one that "
        f"`exchange` did not make: {missing[0]!r:.200}."
      )
    shapes = jax.tree.map(jax.typeof, state)
    found.append(TracedState(shapes, [notes[id(node)] for node in nodes]))
    return jnp.zeros(())

  def map_workers(fun: Any, out_specs: Any) -> Any:
    def run(params: PyTree) -> PyTree:
      placed = core.place_tree(params, mesh, shardings.params(params))
      return jax.shard_map(
        fun, in_specs=P(), out_specs=out_specs, **shardings.map_options
      )(placed)

    return run

  shardings = _shardings.Shardings(mesh, axis_name, specs)
  with core.without_context_mesh():
    jax.eval_shape(map_workers(trace_init, P()), params)
    own_specs = core.state_specs(found[0].state, axis_name)
    state = jax.eval_shape(map_workers(init, own_specs), params)
  return TracedState(jax.tree.map(core.shape_dtype, state), found[0].exchanges)
