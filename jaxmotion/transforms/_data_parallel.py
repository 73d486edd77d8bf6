"""Data-parallel training step made from a loss function."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion.collectives.extend import check_batch, check_exchanged
from jaxmotion.core import (
  Array,
  AxisName,
  PyTree,
  StepsInFlight,
  axis_names,
  check_arrays,
  check_axis_name,
  check_bool,
  check_buffers,
  check_callable,
  check_instance,
  map_local_work,
  place_tree,
  state_specs,
  to_varying,
)


def local_value_and_grad(
  fun: Callable[..., Any], axis_name: AxisName, *, has_aux: bool = False
) -> Callable[..., Any]:
  """Returns `jax.value_and_grad` whose gradient stays this worker's own.

  Inside `shard_map`, plain `jax.grad` with respect to replicated parameters
  sums the gradient over workers at full precision before any codec sees it.

  Args:
    fun: function whose first argument are the parameters.
    axis_name: the workers' axis.
    has_aux: whether `fun` returns (value, aux).

  Returns:
    A function like `jax.value_and_grad(fun)`, to call where the axis is bound.

  Raises:
    TypeError: an argument of another type.

  Example:
    >>> def loss(w, x):
    ...   return jnp.sum(w * x)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def grads(w, x):
    ...   return local_value_and_grad(loss, "data")(w, x)[1]
    >>> jax.jit(jax.shard_map(
    ...   grads, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    ... ))(jnp.ones(2), jnp.array([3.0, 4.0])).tolist()
    [3.0, 4.0]
  """
  check_callable("fun", fun)
  check_axis_name("axis_name", axis_name)
  check_bool("has_aux", has_aux)
  value_and_grad = jax.value_and_grad(fun, has_aux=has_aux)

  def wrapped(params: PyTree, *args: Any, **kwargs: Any) -> Any:
    check_arrays("params", params)
    return value_and_grad(to_varying(params, axis_name), *args, **kwargs)

  return wrapped


def data_parallel(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  has_aux: bool = False,
  mean_loss: bool = True,
  donate: bool = True,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Makes `init` and `step` for training over a mesh axis.

  Args:
    loss_fn: (params, batch) -> scalar mean over the worker's own batch, or
      (scalar, aux) with `has_aux`.
    tx: optax chain with an `exchange` over `axis_name`.
    mesh: device mesh that has the axis.
    axis_name: the axis (or axes) that the batch is split over.
    has_aux: whether `loss_fn` returns auxiliary values. Floating-point scalars
      are averaged over workers. Other values, such as counts and logits, get a
      leading axis of workers.
    mean_loss: whether the loss (and floating-point scalars of the auxiliary
      values) are the workers' mean. That mean is a collective of its own,
      which costs round trips and makes workers wait for one another. Without
      it each value has a leading axis of workers, and a process holds only its
      own workers' values.
    donate: whether `step` takes the buffers of `params` and `opt_state` for its
      results, so that both exist once. They are deleted then: go on with what
      `step` returned. False keeps them, for a notebook whose cells run twice.

  Returns:
    init: params -> (params, opt_state), placed on the mesh; per-worker state
      is split over the axis, all else replicated. The result is a copy.
    step: (params, opt_state, batch, **extra_args) -> (params, opt_state, loss
      or (loss, aux)), jitted; the buffers of `params` and `opt_state` are
      donated (see `donate`). Every leaf of `batch` is split along its leading
      axis. Extra arguments go to `tx.update`: scalars that all workers share.
      On several CPU devices of one process, a call waits until at most 4 steps
      are in flight: XLA:CPU can hang when a loop runs further ahead.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis. `step` raises it for a `tx` that
      does not exchange gradients before they are used, for a batch that the
      workers do not divide, and for `params` or an `opt_state` that was
      donated before.

  Example:
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> tx = optax.chain(
    ...   transforms.exchange("data", codecs.uniform(bits=8)), optax.sgd(0.1)
    ... )
    >>> init, step = data_parallel(loss_fn, tx, mesh)
    >>> params, opt_state = init({"w": jnp.zeros((2, 1))})
    >>> batch = {"x": jnp.eye(2), "y": jnp.ones((2, 1))}
    >>> params, opt_state, loss = step(params, opt_state, batch)
    >>> float(loss)
    1.0
  """
  check_callable("loss_fn", loss_fn)
  check_instance(
    "tx", tx, optax.GradientTransformation, "an optax transformation"
  )
  check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  check_axis_name("axis_name", axis_name)
  check_bool("has_aux", has_aux)
  check_bool("mean_loss", mean_loss)
  check_bool("donate", donate)
  _check_axes(mesh, axis_name)
  value_and_grad = jax.value_and_grad(loss_fn, has_aux=has_aux)
  update = optax.with_extra_args_support(tx).update
  split = P(axis_name)

  def init(params: PyTree) -> tuple[PyTree, PyTree]:
    check_arrays("params", params)
    check_buffers({"params": params})
    return jitted_init(params)

  @jax.jit
  def jitted_init(params: PyTree) -> tuple[PyTree, PyTree]:
    params = place_tree(params, mesh, P())
    # A map, so that parameters are on the mesh whatever the state is.
    copy = jax.shard_map(
      lambda p: jax.tree.map(jnp.copy, p),
      mesh=mesh,
      in_specs=P(),
      out_specs=P(),
    )
    return copy(params), _init_state(tx, params, mesh, axis_name)

  def is_averaged(metric: Array) -> bool:
    """Whether a metric, with its axis of workers, becomes their mean."""
    is_scalar = metric.ndim == 1
    return mean_loss and is_scalar and jnp.issubdtype(metric, jnp.floating)

  def compute_gradients(params: PyTree, batch: PyTree) -> PyTree:
    own = value_and_grad(params, batch)
    return jax.tree.map(lambda a: jnp.expand_dims(a, 0), own)

  def update_params(
    params: PyTree, opt_state: PyTree, own: PyTree, extra_args: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    metrics, grads = own
    grads = jax.tree.map(lambda g: jnp.squeeze(g, 0), grads)
    updates, opt_state = update(grads, opt_state, params, **extra_args)
    params = optax.apply_updates(params, updates)
    check_exchanged(params, opt_state, axis_name)
    metrics = jax.tree.map(
      lambda m: lax.pmean(m[0], axis_name) if is_averaged(m) else m, metrics
    )
    return params, opt_state, metrics

  def step(
    params: PyTree, opt_state: PyTree, batch: PyTree, **extra_args: Any
  ) -> tuple[PyTree, PyTree, PyTree]:
    check_batch(batch, mesh, axis_name)
    specs = state_specs(opt_state, axis_name)
    params, opt_state, batch, extra_args = place_tree(
      (params, opt_state, batch, extra_args), mesh, (P(), specs, split, P())
    )
    # Two maps, of which XLA makes one program. Only the second checks what
    # varies over workers, so that replicas that could differ are an error.
    own = map_local_work(compute_gradients, mesh, axis_name, (P(), split))(
      params, batch
    )
    metrics, _ = own
    metric_specs = jax.tree.map(
      lambda m: P() if is_averaged(m) else split, metrics
    )
    return jax.shard_map(
      update_params,
      mesh=mesh,
      in_specs=(P(), specs, split, P()),
      out_specs=(P(), specs, metric_specs),
    )(params, opt_state, own, extra_args)

  jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
  donated = ("params", "opt_state") if donate else ()
  in_flight = StepsInFlight(mesh)

  @functools.wraps(step)
  def checked_step(
    params: PyTree, opt_state: PyTree, batch: PyTree, **extra_args: Any
  ) -> tuple[PyTree, PyTree, PyTree]:
    args = {"params": params, "opt_state": opt_state, "batch": batch}
    check_buffers(args | extra_args, donated)
    in_flight.wait(params)
    try:
      results = jitted(params, opt_state, batch, **extra_args)
    except (TypeError, ValueError, OverflowError):
      # Only after an error: a step shall not look at every leaf.
      for name, tree in args.items():
        check_arrays(name, tree)
      raise
    in_flight.add(results[2])
    return results

  for name in ("lower", "trace", "eval_shape"):
    setattr(checked_step, name, getattr(jitted, name))
  return init, checked_step


def init_state(
  tx: optax.GradientTransformation,
  params: PyTree,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
) -> PyTree:
  """Makes the optimizer state of a chain with an exchange, on the mesh.

  `tx.init` of a codec with state runs only where the workers' axis is bound.
  This function binds it, for a training step of one's own.

  Args:
    tx: optax chain with an `exchange` over `axis_name`.
    params: parameters, the same on all workers.
    mesh: device mesh that has the axis.
    axis_name: the axis (or axes) of the workers.

  Returns:
    The state of `tx.init`: per-worker state is split over the axis, all else
    is replicated. `jaxmotion.state_specs` has its specs for `shard_map`.

  Raises:
    ValueError: the mesh has no such axis.

  Example:
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> tx = transforms.exchange("data", codecs.feedback(codecs.sign()))
    >>> state = init_state(tx, jnp.zeros(3), mesh)
    >>> int(state.count)
    0
  """
  check_instance(
    "tx", tx, optax.GradientTransformation, "an optax transformation"
  )
  check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  check_axis_name("axis_name", axis_name)
  check_arrays("params", params)
  _check_axes(mesh, axis_name)
  check_buffers({"params": params})

  @jax.jit
  def init(params: PyTree) -> PyTree:
    return _init_state(tx, place_tree(params, mesh, P()), mesh, axis_name)

  return init(params)


def _check_axes(mesh: Mesh, axis_name: AxisName) -> None:
  for name in axis_names(axis_name):
    if name not in mesh.axis_names:
      raise ValueError(
        f"`axis_name` must be an axis of the mesh {mesh.axis_names}, "
        f"got {name!r}."
      )


def _init_state(
  tx: optax.GradientTransformation,
  params: PyTree,
  mesh: Mesh,
  axis_name: AxisName,
) -> PyTree:
  """Returns the state of parameters that are placed on the mesh."""
  specs = state_specs(_state_shapes(tx, params, mesh), axis_name)
  return jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)(
    params
  )


def _state_shapes(
  tx: optax.GradientTransformation, params: PyTree, mesh: Mesh
) -> PyTree:
  """Returns the shapes of the state by tracing `tx.init` with the axis bound.

  The specs that `shard_map` needs depend on a state that only exists inside
  it. So a first trace stores the structure in a list as a side effect.
  """
  found = []

  def trace_init(params: PyTree) -> jax.Array:
    found.append(jax.tree.map(jax.typeof, tx.init(params)))
    return jnp.zeros(())

  jax.eval_shape(
    jax.shard_map(trace_init, mesh=mesh, in_specs=P(), out_specs=P()), params
  )
  return found[0]
