"""Gradients of a loss on modules over the whole batch, to be exchanged."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import extend


@core.declare(
  fun=core.function,
  has_aux=core.boolean,
  axis_name=core.worker_axes,
)
def value_and_grad(
  fun: Callable[..., Any],
  *,
  argnums: int | nnx.DiffState = 0,
  has_aux: bool = False,
  axis_name: AxisName = "data",
) -> Callable[..., Any]:
  """Makes a function of a loss's value and of gradients to be exchanged.

  It stands where `nnx.value_and_grad` stood, under an ordinary `nnx.jit`. See
  `jaxmotion.value_and_grad`: the loss sees the whole batch, and only the
  gradients are each worker's own. Modules are updated in place: batch
  statistics, and the counts of random keys.

  Args:
    fun: loss function; it returns a scalar, or with `has_aux` a pair.
    argnums: position of the module that is differentiated by its `nnx.Param`,
      or an `nnx.DiffState` of a position and a filter of variables.
    has_aux: whether `fun` returns a pair of the loss and other results.
    axis_name: the axis (or axes) of the mesh that the batch is split over.
      Variables are what all workers hold. Arrays of other arguments whose
      leading dimension the workers divide are taken to be split along it.

  Returns:
    A function of the arguments of `fun` that returns what that of
    `nnx.value_and_grad` returns, with unsummed gradients, for the `exchange`
    that is first in the optimizer's chain.

  Raises:
    TypeError: an argument of another type.
    ValueError: no argument is on a mesh that has the axis, or a parameter is
      sharded over it.

  Example:
    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
    >>> tx = optax.chain(transforms.exchange("data"), optax.sgd(0.5))
    >>> @nnx.jit
    ... def train_step(model, optimizer, x):
    ...   def loss_fn(model, x):
    ...     return jnp.mean((model(x) - 1) ** 2)
    ...   loss, grads = value_and_grad(loss_fn)(model, x)
    ...   optimizer.update(model, grads)
    ...   return loss
    >>> with jax.set_mesh(mesh):
    ...   model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    ...   optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    ...   losses = [train_step(model, optimizer, jnp.eye(4, 2)) for _ in "ab"]
    >>> float(losses[0]) > float(losses[1])
    True
  """
  if not isinstance(argnums, nnx.DiffState):
    argnums = nnx.DiffState(core.integer(0)("argnums", argnums), nnx.Param)
  number = argnums.argnum
  is_chosen = nnx.filterlib.to_predicate(argnums.filter)

  def is_own(path: Any, x: Any) -> bool:
    return path[:2] == (0, number) and is_chosen(path[2:], x)

  def split(given: Any) -> Any:
    return nnx.split(given, is_own, nnx.Variable, ...)

  @functools.wraps(fun)
  def run(*args: Any, **kwargs: Any) -> Any:
    if len(args) <= number:
      raise ValueError(
        f"`argnums` must be a position of an argument, got {number} for "
        f"{len(args)}."
      )
    given = list(args), kwargs
    graph, own, held, arrays = split(given)

    def call(own: PyTree, held: PyTree, arrays: PyTree) -> Any:
      args, kwargs = nnx.merge(graph, own, held, arrays, copy=True)
      result = fun(*args, **kwargs)
      loss, aux = result if has_aux else (result, None)
      # The variables as `fun` has left them.
      _, _, held, _ = split((args, kwargs))
      return loss, (aux, held)

    (loss, (aux, held)), grads = extend.differentiate(
      call, own, held, arrays, True, axis_name
    )
    nnx.update(given, held)
    return ((loss, aux) if has_aux else loss), grads[0][number]

  return run
