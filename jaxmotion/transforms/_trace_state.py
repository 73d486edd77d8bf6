"""Shapes of a chain's state, and the exchanges inside of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from jaxmotion.core import (
  AxisName,
  PyTree,
  check_arrays,
  check_axis_name,
  check_instance,
  shape_dtype,
  state_specs,
)
from jaxmotion.transforms._exchange_state import (
  ExchangeOptions,
  ExchangeState,
  initialized_exchanges,
)
from jaxmotion.transforms._init_state import check_axes


class TracedState(NamedTuple):
  """State of a chain, without its arrays.

  Attributes:
    state: ShapeDtypeStructs of the whole state; per-worker leaves have a
      leading axis of all workers.
    exchanges: options of each exchange, in the order of their states.
  """

  state: PyTree
  exchanges: list[ExchangeOptions]


def trace_state(
  tx: optax.GradientTransformation,
  params: PyTree,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
) -> TracedState:
  """Returns the shapes of a state and the exchanges it belongs to.

  Args:
    tx: optax chain.
    params: parameters or their shapes.
    mesh: mesh that has the axis; without devices, to ask about other numbers
      of workers.
    axis_name: the axis (or axes) of the workers.

  Raises:
    ValueError: a transformation in `tx` changes the states of exchanges inside
      of it.
  """
  check_instance(
    "tx", tx, optax.GradientTransformation, "an optax transformation"
  )
  check_arrays("params", params, numbers=False)
  check_instance("mesh", mesh, (Mesh, AbstractMesh), "a mesh of jax.sharding")
  check_axis_name("axis_name", axis_name)
  check_axes(mesh, axis_name)
  found: list[TracedState] = []
  params = jax.tree.map(shape_dtype, params)

  def is_state(node: Any) -> bool:
    return isinstance(node, ExchangeState)

  def trace_init(params: PyTree) -> jax.Array:
    token = initialized_exchanges.set([])
    try:
      state = tx.init(params)
      notes = {
        id(node): options for node, options in initialized_exchanges.get() or ()
      }
    finally:
      initialized_exchanges.reset(token)
    nodes = [n for n in jax.tree.leaves(state, is_leaf=is_state) if is_state(n)]
    if missing := [node for node in nodes if id(node) not in notes]:
      raise ValueError(
        "`tx` must keep the states of its exchanges as they are, got one that "
        f"`exchange` did not make: {missing[0]!r:.200}."
      )
    shapes = jax.tree.map(jax.typeof, state)
    found.append(TracedState(shapes, [notes[id(node)] for node in nodes]))
    return jnp.zeros(())

  jax.eval_shape(
    jax.shard_map(trace_init, mesh=mesh, in_specs=P(), out_specs=P()), params
  )
  specs = state_specs(found[0].state, axis_name)
  state = jax.eval_shape(
    jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs), params
  )
  return TracedState(jax.tree.map(shape_dtype, state), found[0].exchanges)
