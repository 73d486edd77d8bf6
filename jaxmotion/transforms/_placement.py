"""Checks of where an exchange stands and of what is trained."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core
from jaxmotion.core import PyTree
from jaxmotion.transforms import _exchange, _states

_SOMETIMES = (
  "which runs it at some steps only: exchange first, and put the wrapper "
  "around what follows"
)
# Wrappers under which an exchange does not run, or is dropped, at some steps.
_WRAPPERS: dict[type, tuple[str, str]] = {
  optax.MultiStepsState: (
    "MultiSteps",
    "which runs it every mini-step and drops the result: put MultiSteps behind "
    "it, or accumulate within a step by "
    "make_train_step(..., microbatches=)",
  ),
  optax.ApplyIfFiniteState: (
    "apply_if_finite",
    "which lets each worker decide alone: use "
    "jaxmotion.skip_nonfinite(chain, axis_name) instead",
  ),
  optax.ConditionallyMaskState: ("conditionally_mask", _SOMETIMES),
  optax.ConditionallyTransformState: ("conditionally_transform", _SOMETIMES),
}


def as_transformation(
  tx: optax.GradientTransformation | optax.MultiSteps, name: str = "tx"
) -> optax.GradientTransformation:
  """Returns an optax transformation, also for an `optax.MultiSteps`."""
  if isinstance(tx, optax.MultiSteps):
    tx = tx.gradient_transformation()
  core.check_instance(
    name, tx, optax.GradientTransformation, "an optax transformation"
  )
  return tx


def check_placement(opt_state: PyTree) -> None:
  """Raises if an exchange is inside a wrapper that does not always run it."""
  for node in jax.tree.leaves(
    opt_state, is_leaf=lambda n: is_exchange(n) or type(n) in _WRAPPERS
  ):
    if type(node) in _WRAPPERS and has_exchange(tuple(node)):
      name, remedy = _WRAPPERS[type(node)]
      raise ValueError(
        f"`tx` must have no exchange inside optax.{name}, {remedy}."
      )


def is_exchange(node: Any) -> bool:
  """Says whether a node is the state of an exchange."""
  return isinstance(node, _exchange.ExchangeState | _states.ShardedState)


def find_exchanges(state: PyTree) -> list[Any]:
  """Returns the states of exchanges inside of a state, in order."""
  nodes = jax.tree.leaves(state, is_leaf=is_exchange)
  return list(filter(is_exchange, nodes))


def has_exchange(state: PyTree) -> bool:
  """Returns whether a state is that of a chain with an exchange."""
  return bool(find_exchanges(state))


def check_trained(params: PyTree) -> None:
  """Raises unless every parameter can have a gradient."""
  for path, leaf in core.named_leaves(params):
    like = jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
    if not jnp.issubdtype(like.dtype, jnp.inexact):
      name = "/".join(filter(None, ("params", path)))
      raise TypeError(
        f"`{name}` must be a floating-point array, got "
        f"{core.shape_string(like)}: "
        "keep what has no gradient, such as counters and tables of integers, "
        "in the loss's closure or the model's state."
      )
