"""Argument checks that `advise` and `fit_memory` share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core, perfmodel


def _check_batch(name: str, value: Any) -> Any:
  """Returns a tuple of trees of arrays, or raises."""
  # An array would otherwise be split by its rows.
  if not isinstance(value, tuple):
    raise TypeError(
      f"`{name}` must be a tuple of the arguments after `params`, got a "
      f"{type(value).__name__}: write `(batch,)` for a single argument."
    )
  return core.arrays(name, value)


PROBLEM: dict[str, core.Kind] = {
  "params": core.arrays,
  "batch": _check_batch,
  "platform": core.instance(
    perfmodel.Platform,
    "a perfmodel.Platform (see builtin_platform and load_platform)",
  ),
  "optimizer": core.optional(
    core.instance(
      optax.GradientTransformation, "an optax.GradientTransformation or None"
    )
  ),
}


def check_call(
  names: tuple[str, str, str],
  fn: Callable[..., Any],
  params: Any,
  batch: tuple[Any, ...],
) -> None:
  """Raises unless a function can be traced with its arguments."""
  name, params_name, batch_name = names
  try:
    jax.eval_shape(fn, params, *batch)
  except (TypeError, ValueError) as error:
    if type(error) not in (TypeError, ValueError):
      raise
    shapes = jax.tree.map(jnp.shape, (params, *batch))
    raise type(error)(
      f"`{name}` must take `{params_name}` and `{batch_name}`, got arguments of"
      f" shapes {shapes}: {error}"
    ) from error
