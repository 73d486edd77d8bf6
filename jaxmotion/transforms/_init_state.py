"""States of chains and steps: made on the mesh, or as shapes alone."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree, state_specs
from jaxmotion.transforms import _model_axes, _states

MAKER = "state_maker"  # Attribute of the `init` of a step.
Init = Callable[[PyTree], PyTree]


@core.declare(tx=_states.as_transformation, params=core.arrays)
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
  axis_name = check_mesh(mesh, axis_name)
  core.check_buffers({"params": params})
  shardings = _model_axes.Shardings(mesh, axis_name, specs)
  shardings.check_params(params)

  @jax.jit
  def init(params: PyTree) -> PyTree:
    params = shardings.place(params, shardings.params(params))
    return make_state(tx.init, params, shardings)

  return init(core.put_on_mesh(params, mesh, shardings.params(params)))


@core.declare(tx=_states.as_transformation)
def bind_mesh(
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  specs: PyTree | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Lets an optimizer with per-worker state be initialized anywhere.

  The state of `codecs.feedback` differs between workers, so that `init` needs
  to know them. `flax.training.train_state.TrainState.create`,
  `flax.nnx.Optimizer` and scripts call it where no axis is bound. There,
  `init` of the result does what `transforms.init_state` does. Inside of
  `shard_map` or `pmap` it is that of `tx`.

  Args:
    tx: optax chain with an `exchange` over `axis_name`.
    mesh: device mesh that has the axis.
    axis_name: the axis (or axes) of the workers.
    specs: how parameters are sharded over other axes of the mesh;
      None: they are not.

  Returns:
    A transformation with the `update` of `tx`.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis.

  Example:
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> codec = codecs.feedback(codecs.sign())
    >>> tx = optax.chain(transforms.exchange("data", codec), optax.sgd(0.1))
    >>> state = bind_mesh(tx, mesh).init({"w": jnp.zeros(3)})
    >>> int(state[0].count)
    0
  """
  axis_name = check_mesh(mesh, axis_name)
  _model_axes.check_specs(specs, axis_name)

  def init_fn(params: PyTree) -> PyTree:
    if core.axis_is_bound(axis_name):
      return tx.init(params)
    return init_state(tx, params, mesh, axis_name=axis_name, specs=specs)

  update: Any = optax.with_extra_args_support(tx).update
  return optax.GradientTransformationExtraArgs(init_fn, update)


def check_mesh(
  mesh: Any, axis_name: Any, *, is_abstract: bool = False
) -> AxisName:
  """Returns the names of the workers' axes; raises unless a mesh has them."""
  # is_abstract: whether a mesh without devices will do.
  kinds = (Mesh, AbstractMesh) if is_abstract else Mesh
  noun = "a jax.sharding.Mesh" + " or AbstractMesh" * is_abstract
  core.instance(kinds, noun)("mesh", mesh)
  names = core.worker_axes("axis_name", axis_name)
  for name in core.axis_names(names):
    if name not in mesh.axis_names:
      raise ValueError(
        f"`axis_name` must be an axis of the mesh {mesh.axis_names}, "
        f"got {name!r}."
      )
  return names


def make_state(
  init_own: Init, params: PyTree, shardings: _model_axes.Shardings
) -> PyTree:
  """Returns the state, on the mesh, of parameters that are placed there."""
  state = _map_init(init_own, params, shardings)
  return shardings.place(state, shardings.state(state, params))


def _map_init(
  init_own: Init, params: PyTree, shardings: _model_axes.Shardings
) -> PyTree:
  """Makes each worker's state inside of a map over the workers."""
  init_shards = lambda params: shard_states(
    init_own(params), params, shardings.specs
  )
  maps = {"in_specs": P(), **shardings.map_options}
  shapes = core.eval_shape_in_map(init_shards, maps, params)
  _states.check_placement(shapes)
  own_specs = state_specs(shapes, shardings.axis_name)
  return jax.shard_map(init_shards, out_specs=own_specs, **maps)(params)


def shard_states(state: PyTree, params: PyTree, specs: PyTree | None) -> PyTree:
  """Replaces the states of exchanges by those of sharded parameters."""
  # `init` of an optax chain takes no specs. So the chain's exchanges begin with
  # states of whole arrays. Their `made_for` holds the tree that each is for,
  # which may be a part of the parameters, and how to make its state.
  if specs is None:
    return state
  specs = _model_axes.spread_specs(specs, params)
  by_path = [dict(jax.tree.leaves_with_path(tree)) for tree in (params, specs)]

  def init_again(node: Any) -> Any:
    """Returns a new state of an exchange; other nodes as they are."""
    if not _states.is_exchange(node):
      return node
    options = node.made_for
    # The parameters and specs at the paths of this exchange's tree.
    own_params, own_specs = (
      jax.tree.map_with_path(lambda path, _, at=at: at[path], options.params)
      for at in by_path
    )
    return options.init(own_params, own_specs)

  return jax.tree.map(init_again, state, is_leaf=_states.is_exchange)


class StateMaker(NamedTuple):
  """Function that makes one worker's state, wherever the axis is bound."""

  # Parameters, whole on every worker -> one worker's state.
  init: Init
  # Parameters -> `Fragments`, of `local_updates`; otherwise None.
  divide: Callable[[PyTree], Any] | None = None


def find_maker(tx: Any) -> StateMaker:
  """Returns the function that makes one worker's state inside of a map."""
  # tx: optax chain, or the `init` of a step that makes its own state.
  maker = getattr(tx, MAKER, None)
  if isinstance(maker, StateMaker):
    return maker
  noun = "an optax transformation, or the `init` of a training step"
  core.instance(optax.GradientTransformation, noun)("tx", tx)
  return StateMaker(tx.init)


@core.declare(params=core.typed_arrays)
def trace_state(
  tx: optax.GradientTransformation | Callable[..., Any],
  params: PyTree,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: PyTree | None = None,
) -> PyTree:
  """Returns the shapes of a state, whose per-worker leaves have rows."""
  # tx: optax chain, or the `init` that `make_train_step` returned. mesh: one
  # without devices will do, to ask about other numbers of workers.
  init_whole = find_maker(tx).init
  axis_name = check_mesh(mesh, axis_name, is_abstract=True)
  params = jax.tree.map(core.shape_dtype, params)
  shardings = _model_axes.Shardings(mesh, axis_name, specs)

  def make(params: PyTree) -> PyTree:
    placed = shardings.place(params, shardings.params(params))
    return _map_init(init_whole, placed, shardings)

  with core.without_context_mesh():
    return jax.tree.map(core.shape_dtype, jax.eval_shape(make, params))
