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
  AxisName,
  PyTree,
  StepsInFlight,
  axis_names,
  check_bool,
  check_buffers,
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
  value_and_grad = jax.value_and_grad(fun, has_aux=has_aux)

  def wrapped(params: PyTree, *args: Any, **kwargs: Any) -> Any:
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
    has_aux: whether `loss_fn` returns auxiliary values; floating-point ones
      are averaged over workers.
    mean_loss: whether the loss (and auxiliary values) are the workers' mean.
      That mean is a collective of its own, which costs round trips and makes
      workers wait for one another. Without it each value has a leading axis of
      workers, and a process holds only its own workers' values.
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
  check_bool("donate", donate)
  for name in axis_names(axis_name):
    if name not in mesh.axis_names:
      raise ValueError(
        f"`axis_name` must be an axis of the mesh {mesh.axis_names}, "
        f"got {name!r}."
      )
  grad_fn = local_value_and_grad(loss_fn, axis_name, has_aux=has_aux)
  update = optax.with_extra_args_support(tx).update

  def init(params: PyTree) -> tuple[PyTree, PyTree]:
    check_buffers({"params": params})
    return jitted_init(params)

  @jax.jit
  def jitted_init(params: PyTree) -> tuple[PyTree, PyTree]:
    specs = state_specs(_state_shapes(tx, params, mesh), axis_name)
    opt_state = jax.shard_map(
      tx.init, mesh=mesh, in_specs=P(), out_specs=specs
    )(params)
    copy = jax.shard_map(
      lambda p: jax.tree.map(jnp.copy, p),
      mesh=mesh,
      in_specs=P(),
      out_specs=P(),
    )
    return copy(params), opt_state

  def local_step(
    params: PyTree, opt_state: PyTree, batch: PyTree, extra_args: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    metrics, grads = grad_fn(params, batch)
    updates, opt_state = update(grads, opt_state, params, **extra_args)
    params = optax.apply_updates(params, updates)
    check_exchanged(params, opt_state, axis_name)
    if mean_loss:
      metrics = _average_workers(metrics, axis_name)
    else:
      metrics = jax.tree.map(
        lambda m: to_varying(jnp.expand_dims(m, 0), axis_name), metrics
      )
    return params, opt_state, metrics

  def step(
    params: PyTree, opt_state: PyTree, batch: PyTree, **extra_args: Any
  ) -> tuple[PyTree, PyTree, PyTree]:
    check_batch(batch, mesh, axis_name)
    specs = state_specs(opt_state, axis_name)
    return jax.shard_map(
      local_step,
      mesh=mesh,
      in_specs=(P(), specs, P(axis_name), P()),
      out_specs=(P(), specs, P() if mean_loss else P(axis_name)),
    )(params, opt_state, batch, extra_args)

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
    results = jitted(params, opt_state, batch, **extra_args)
    in_flight.add(results[2])
    return results

  for name in ("lower", "trace", "eval_shape"):
    setattr(checked_step, name, getattr(jitted, name))
  return init, checked_step


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


def _average_workers(metrics: PyTree, axis_name: AxisName) -> PyTree:
  def mean(x: Any) -> Any:
    return lax.pmean(to_varying(x, axis_name), axis_name)

  return jax.tree.map(mean, metrics)
