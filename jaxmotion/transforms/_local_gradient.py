"""Gradient of a worker inside of a map of one's own."""

from collections.abc import Callable
from typing import Any

import jax

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree


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
    >>> split = jax.P("data")
    >>> jax.jit(jax.shard_map(
    ...   grads, mesh=mesh, in_specs=(jax.P(), split), out_specs=split
    ... ))(jnp.ones(2), jnp.array([3.0, 4.0])).tolist()
    [3.0, 4.0]
  """
  core.check_callable("fun", fun)
  axis_name = core.flatten_axes("axis_name", axis_name)
  core.check_bool("has_aux", has_aux)
  value_and_grad = jax.value_and_grad(fun, has_aux=has_aux)

  def wrapped(params: PyTree, *args: Any, **kwargs: Any) -> Any:
    core.check_arrays("params", params)
    return value_and_grad(core.to_varying(params, axis_name), *args, **kwargs)

  return wrapped
