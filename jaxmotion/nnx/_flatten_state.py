"""`flatten_state`: optimizer state of bare arrays, for `nnx.Optimizer`."""

from typing import Any

import jax
import optax

from jaxmotion import core
from jaxmotion.core import PyTree


def flatten_state(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Keeps the state of a transformation as a tuple of its arrays.

  `nnx.Optimizer` rebuilds the nodes of a state that its variables hold, and
  does not know those of `memory.compress_state`. A tuple of arrays it leaves as
  it is. Wrap no exchange in it: the markers of per-worker state are nodes too.

  Args:
    tx: any optax transformation whose state is made of arrays.

  Returns:
    A transformation with the same updates.

  Raises:
    TypeError: `tx` is not a transformation.

  Example:
    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from jaxmotion import memory
    >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    >>> tx = flatten_state(memory.adamw_8bit(1e-3))
    >>> optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    >>> @nnx.jit
    ... def step(model, optimizer, x):
    ...   grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
    ...   optimizer.update(model, grads)
    >>> step(model, optimizer, jnp.ones((4, 64)))
    >>> int(optimizer.step[...])
    1
  """
  core.check_instance(
    "tx", tx, optax.GradientTransformation, "an optax.GradientTransformation"
  )
  inner = optax.with_extra_args_support(tx)

  def init_fn(params: PyTree) -> tuple[Any, ...]:
    core.check_arrays("params", params)
    return tuple(jax.tree.leaves(inner.init(params)))

  def update_fn(
    updates: PyTree,
    state: tuple[Any, ...],
    params: PyTree | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, tuple[Any, ...]]:
    core.check_arrays("updates", updates)
    core.check_arrays("params", params)
    if params is not None:
      core.check_like("updates", updates, params, "`params`")
    like = jax.eval_shape(inner.init, updates if params is None else params)
    # `nnx.Optimizer` makes an object with integer keys of the tuple.
    leaves = jax.tree.leaves(state)
    core.check_like("state", leaves, jax.tree.leaves(like), "`init`")
    nested = jax.tree.unflatten(jax.tree.structure(like), leaves)
    new_updates, new = inner.update(updates, nested, params, **extra_args)
    return new_updates, tuple(jax.tree.leaves(new))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
