"""Adapters of the room `memory`: residuals and optimizer states of modules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from jaxmotion import core, perfmodel
from jaxmotion.core import PyTree
from jaxmotion.memory import residuals


def compress_residuals(
  fn: Callable[..., Any],
  codec: residuals.Action
  | residuals.ResidualRules
  | residuals.ResidualChoice = None,
  *,
  memory_budget: float | None = None,
  device: perfmodel.Device | None = None,
) -> Callable[..., Any]:
  """Returns a function of modules that saves fewer bytes for gradients.

  It takes the place of `nnx.remat`, and is `memory.compress_residuals` for
  functions whose arguments are modules. Variables that the function changes
  (batch statistics, counts of random streams, metrics) change as without it.
  All variables count as parameters, which stay in memory anyway.

  Args:
    fn: function of modules and arrays, such as the `__call__` of a class.
      Arguments that are no arrays are seen as they are.
    codec: how residuals are saved; see `memory.compress_residuals`.
    memory_budget: most bytes of residuals; see `memory.compress_residuals`.
    device: device whose times are predicted; None for an H100.

  Returns:
    A function with the arguments of `fn`. It raises a ValueError if `fn` adds
    or removes variables.

  Raises:
    TypeError: `fn` is no function, or `codec` of the wrong type.
    ValueError: `memory_budget` is negative, or below the fewest bytes.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> class Block(nnx.Module):
    ...   def __init__(self, rngs):
    ...     self.linear = nnx.Linear(64, 64, rngs=rngs)
    ...     self.norm = nnx.BatchNorm(64, rngs=rngs)
    ...   @functools.partial(compress_residuals, codec=codecs.uniform(bits=8))
    ...   def __call__(self, x):
    ...     return jnp.tanh(self.norm(self.linear(x)))
    >>> block, x = Block(nnx.Rngs(0)), jnp.eye(64)
    >>> grads = nnx.grad(lambda block: jnp.sum(block(x)))(block)
    >>> bool(jnp.all(block.norm.var[...] != 1))
    True
  """
  options: dict[str, Any] = {
    "codec": codec,
    "memory_budget": memory_budget,
    "device": device,
  }
  residuals.compress_residuals(fn, **options)  # Checks.

  @functools.wraps(fn)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    """Calls `fn` on copies of its modules, and updates the modules."""
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
    nodes = {i: x for i, x in enumerate(leaves) if _is_node(x)}
    given = {i: x for i, x in enumerate(leaves) if i not in nodes}
    graph, state = nnx.split(nodes)
    variables, state_tree = jax.tree.flatten(state)
    # Positions of the variables that `fn` changes: found while `run` is traced,
    # because only these are results, which the compressed function returns.
    changed: list[int] = []

    def run(variables: list[Any], given: dict[int, Any]) -> PyTree:
      """Calls `fn` as a function of arrays: JAX differentiates no modules."""
      own = nnx.merge(graph, jax.tree.unflatten(state_tree, variables))
      filled = {**given, **own}
      own_args, own_kwargs = jax.tree.unflatten(
        treedef, [filled[i] for i in range(len(leaves))]
      )
      result = fn(*own_args, **own_kwargs)
      left, new_state = nnx.split(own)
      new = jax.tree.leaves(new_state)
      if left != graph:
        raise ValueError(
          "`fn` must keep the variables of its modules, got "
          f"{getattr(fn, '__name__', fn)}, which adds or removes some."
        )
      pairs = zip(variables, new, strict=True)
      changed[:] = [i for i, (old, now) in enumerate(pairs) if now is not old]
      return result, [new[i] for i in changed]

    compressed = residuals.compress_residuals(run, **options)
    result, new = compressed(variables, given)
    for i, value in zip(changed, new, strict=True):
      variables[i] = value
    if changed:
      nnx.update(nodes, jax.tree.unflatten(state_tree, variables))
    return result

  return wrapped


def _is_node(x: Any) -> bool:
  """Says whether a leaf holds variables."""
  return isinstance(x, nnx.Variable | nnx.Module | nnx.Rngs | nnx.Optimizer)


@core.declare(
  tx=core.instance(
    optax.GradientTransformation, "an optax.GradientTransformation"
  )
)
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
  inner = optax.with_extra_args_support(tx)

  @core.declare(params=core.arrays)
  def init_fn(params: PyTree) -> tuple[Any, ...]:
    return tuple(jax.tree.leaves(inner.init(params)))

  @core.declare(updates=core.arrays, params=core.arrays)
  def update_fn(
    updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, tuple[Any, ...]]:
    """Returns the inner transformation's updates, and its arrays."""
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
