"""Optimizer state of a chain with an exchange, made on the mesh."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree, state_specs
from jaxmotion.transforms import _placement, _shardings


def init_state(
  tx: optax.GradientTransformation,
  params: PyTree,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  specs: PyTree | None = None,
) -> PyTree:
  """Makes the optimizer state of a chain with an exchange, on the mesh.

  `tx.init` of a codec with state runs only where the workers' axis is bound.
  This function binds it, for a training step of one's own.

  Args:
    tx: optax chain with an `exchange` over `axis_name`.
    params: parameters, the same on all workers.
    mesh: device mesh that has the axis.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes, as `data_parallel` takes
      it; None: they are not.

  Returns:
    The state of `tx.init`: per-worker state is split over the axis, all else
    is replicated. `jaxmotion.state_specs` has its specs for `shard_map`.

  Raises:
    ValueError: the mesh has no such axis.

  Example:
    A jitted training step of one's own, in full:

    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> tx = optax.chain(
    ...   transforms.exchange("data", codecs.feedback(codecs.sign())),
    ...   optax.sgd(0.1),
    ... )
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)
    >>> grad_fn = transforms.local_value_and_grad(loss_fn, "data")
    >>> params = jnp.zeros(3)
    >>> opt_state = init_state(tx, params, mesh)
    >>> specs = state_specs(opt_state, "data")  # jaxmotion.state_specs
    >>> def local_step(params, opt_state, batch):
    ...   loss, grads = grad_fn(params, batch)
    ...   updates, opt_state = tx.update(grads, opt_state, params)
    ...   params = optax.apply_updates(params, updates)
    ...   return params, opt_state, jax.lax.pmean(loss, "data")
    >>> step = jax.jit(jax.shard_map(
    ...   local_step,
    ...   mesh=mesh,
    ...   in_specs=(P(), specs, P("data")),
    ...   out_specs=(P(), specs, P()),
    ... ))
    >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.ones(4)}
    >>> params, opt_state, loss = step(params, opt_state, batch)
    >>> float(loss), bool(jnp.allclose(params, 0.2))
    (1.0, True)
  """
  tx = _placement.as_transformation(tx)
  core.check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  core.check_axis_name("axis_name", axis_name)
  core.check_arrays("params", params)
  check_axes(mesh, axis_name)
  core.check_buffers({"params": params})
  shardings = _shardings.Shardings(mesh, axis_name, specs)
  shardings.check_params(params)

  @jax.jit
  def init(params: PyTree) -> PyTree:
    params = shardings.place(params, shardings.params(params))
    return make_state(tx.init, params, axis_name, shardings)

  return init(core.put_on_mesh(params, mesh, shardings.params(params)))


def check_axes(
  mesh: Mesh | AbstractMesh, axis_name: AxisName, argument: str = "axis_name"
) -> None:
  """Raises unless a mesh has the axes."""
  for name in core.axis_names(axis_name):
    if name not in mesh.axis_names:
      raise ValueError(
        f"`{argument}` must be an axis of the mesh {mesh.axis_names}, "
        f"got {name!r}."
      )


def make_state(
  init_own: Callable[[PyTree], PyTree],
  params: PyTree,
  axis_name: AxisName,
  shardings: _shardings.Shardings,
) -> PyTree:
  """Returns the state of parameters that are placed on the mesh."""
  shapes = _state_shapes(init_own, params, shardings.map_options)
  _placement.check_placement(shapes)
  init = jax.shard_map(
    init_own,
    in_specs=P(),
    out_specs=state_specs(shapes, axis_name),
    **shardings.map_options,
  )
  state = init(params)
  return shardings.place(state, shardings.state(state, params))


def _state_shapes(
  init_own: Callable[[PyTree], PyTree],
  params: PyTree,
  map_options: dict[str, Any],
) -> PyTree:
  """Returns the shapes of the state by tracing it with the axis bound."""
  # The specs that `shard_map` needs depend on a state that only exists inside
  # it. So a first trace stores the structure in a list as a side effect.
  found = []

  def trace_init(params: PyTree) -> jax.Array:
    found.append(jax.tree.map(jax.typeof, init_own(params)))
    return jnp.zeros(())

  probe = jax.shard_map(trace_init, in_specs=P(), out_specs=P(), **map_options)
  jax.eval_shape(probe, params)
  return found[0]
