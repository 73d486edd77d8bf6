"""Optimizer state of a chain with an exchange, made on the mesh."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree, state_specs
from jaxmotion.transforms import _model_axes, _placement, _shardings


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
    specs: how parameters are sharded over other axes, as `make_train_step`
      takes it; None: they are not.

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
  axis_name = check_mesh(mesh, axis_name)
  core.check_arrays("params", params)
  core.check_buffers({"params": params})
  shardings = _shardings.Shardings(mesh, axis_name, specs)
  shardings.check_params(params)

  @jax.jit
  def init(params: PyTree) -> PyTree:
    params = shardings.place(params, shardings.params(params))
    return make_state(tx.init, params, axis_name, shardings)

  return init(core.put_on_mesh(params, mesh, shardings.params(params)))


def check_mesh(mesh: Any, axis_name: Any) -> AxisName:
  """Returns the names of the workers' axes; raises unless a mesh has them."""
  core.check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  return check_axes(mesh, axis_name)


def check_axes(mesh: Mesh | AbstractMesh, axis_name: AxisName) -> AxisName:
  """Returns the names of axes, which a mesh without devices may have too."""
  names = core.flatten_axes("axis_name", axis_name)
  for name in core.axis_names(names):
    if name not in mesh.axis_names:
      raise ValueError(
        f"`axis_name` must be an axis of the mesh {mesh.axis_names}, "
        f"got {name!r}."
      )
  return names


def make_state(
  init_own: Callable[[PyTree], PyTree],
  params: PyTree,
  axis_name: AxisName,
  shardings: _shardings.Shardings,
) -> PyTree:
  """Returns the state, on the mesh, of parameters that are placed there."""
  state = map_init(init_own, params, axis_name, shardings)
  return shardings.place(state, shardings.state(state, params))


def map_init(
  init_own: Callable[[PyTree], PyTree],
  params: PyTree,
  axis_name: AxisName,
  shardings: _shardings.Shardings,
) -> PyTree:
  """Makes a state inside of a map over the workers."""

  def init_shards(params: PyTree) -> PyTree:
    return shard_states(init_own(params), params, shardings.specs)

  maps = {"in_specs": P(), **shardings.map_options}
  shapes = core.eval_shape_in_map(init_shards, maps, params)
  _placement.check_placement(shapes)
  own_specs = state_specs(shapes, axis_name)
  return jax.shard_map(init_shards, out_specs=own_specs, **maps)(params)


def shard_states(state: PyTree, params: PyTree, specs: PyTree | None) -> PyTree:
  """Makes the states of exchanges anew, for parameters that axes shard."""
  # `init` of an optax chain takes no specs. So the chain's exchanges begin with
  # states of whole arrays, which say what they are for.
  if specs is None:
    return state
  specs = _model_axes.spread_specs(specs, params)
  known = [dict(jax.tree.leaves_with_path(tree)) for tree in (params, specs)]

  def renew(node: Any) -> Any:
    if not _placement.is_exchange(node):
      return node
    options = node.made_for

    def select_own(by_path: dict[Any, Any]) -> PyTree:
      return jax.tree.map_with_path(lambda p, _: by_path[p], options.params)

    return options.init(*map(select_own, known))

  return jax.tree.map(renew, state, is_leaf=_placement.is_exchange)
