"""Work of one worker by itself: its loss, gradient and model state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmotion.core import (
  Array,
  AxisName,
  PyTree,
  check_arrays,
  check_axis_name,
  check_bool,
  check_callable,
  to_varying,
)
from jaxmotion.transforms._model_state import check_same_shapes


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
    ...   grads, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P("data")
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


class LocalWork(NamedTuple):
  """Results of one worker before anything is exchanged.

  Attributes:
    metrics: loss, or (loss, aux).
    model_state: model state after the batch, or None.
    grads: gradient of the worker's own loss.
  """

  metrics: PyTree
  model_state: PyTree
  grads: PyTree


def make_local_work(
  loss_fn: Callable[..., Any], *, has_aux: bool, stateful: bool
) -> Callable[..., LocalWork]:
  """Makes the function that computes one worker's gradient.

  Args:
    loss_fn: loss of the caller of `data_parallel`.
    has_aux: whether it returns auxiliary values.
    stateful: whether it takes and returns model state.

  Returns:
    A function (params, model_state, batch, key) -> LocalWork; the key is not
    handed on if it is None.
  """

  def compute_loss(
    params: PyTree, model_state: PyTree, batch: PyTree, key: Array | None
  ) -> tuple[Array, tuple[PyTree, PyTree]]:
    kwargs = {} if key is None else {"key": key}
    if not stateful:
      result = loss_fn(params, batch, **kwargs)
      loss, aux = _split_pair(result, "aux") if has_aux else (result, None)
      return loss, (None, aux)
    # A copy: only the trace that made the variables of a Flax model may write
    # to them.
    given = jax.tree.map(lambda a: a, model_state)
    loss, rest = _split_pair(
      loss_fn(params, given, batch, **kwargs),
      "(model_state, aux)" if has_aux else "model_state",
    )
    new, aux = (
      _split_pair(rest, "aux", "model_state") if has_aux else (rest, None)
    )
    return loss, (check_same_shapes(new, model_state), aux)

  value_and_grad = jax.value_and_grad(compute_loss, has_aux=True)

  def compute_work(
    params: PyTree, model_state: PyTree, batch: PyTree, key: Array | None
  ) -> LocalWork:
    (loss, (new, aux)), grads = value_and_grad(params, model_state, batch, key)
    return LocalWork((loss, aux) if has_aux else loss, new, grads)

  return compute_work


def _split_pair(
  result: Any, second: str, first: str = "loss"
) -> tuple[Any, Any]:
  """Returns both values of a pair that `loss_fn` returned, or raises."""
  if not isinstance(result, tuple) or len(result) != 2:
    found = (
      f"{len(result)} values" if isinstance(result, tuple) else type(result)
    )
    raise ValueError(f"`loss_fn` must return ({first}, {second}), got {found}.")
  return result
