"""Argument checks that `advise` and `fit_memory` share."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core, perfmodel


def check_problem(platform: Any, batch: Any, optimizer: Any) -> None:
  """Raises unless arguments beside a function and its parameters are right."""
  core.instance(
    perfmodel.Platform,
    "a perfmodel.Platform (see builtin_platform and load_platform)",
  )("platform", platform)
  # An array would otherwise be split by its rows.
  if not isinstance(batch, tuple):
    raise TypeError(
      "`batch` must be a tuple of the arguments after `params`, got a "
      f"{type(batch).__name__}: write `(batch,)` for a single argument."
    )
  if optimizer is not None:
    noun = "an optax.GradientTransformation or None"
    core.instance(optax.GradientTransformation, noun)("optimizer", optimizer)


def check_call(
  names: tuple[str, str, str],
  fn: Callable[..., Any],
  params: Any,
  batch: tuple[Any, ...],
) -> None:
  """Raises unless a function can be traced with its arguments."""
  name, params_name, batch_name = names
  core.function(name, fn)
  core.arrays(params_name, params)
  core.arrays(batch_name, batch)
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


def check_positive(name: str, value: Any, most: float = math.inf) -> None:
  """Raises unless `value` is a positive, finite number."""
  # Measured times are often medians of arrays, NumPy's float64.
  value = float(value) if isinstance(value, float) else value
  core.number(0, most, open_low=True)(name, value)
