"""Argument checks that `advise` and `fit_memory` share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core, perfmodel


def check_batch(batch: Any) -> None:
  """Raises unless `batch` is a tuple of arguments.

  Args:
    batch: the caller's arguments after the parameters.

  Raises:
    TypeError: not a tuple; an array would otherwise be split by its rows.

  >>> check_batch([1])
  Traceback (most recent call last):
  ...
  TypeError: `batch` must be a tuple of the arguments after `params`, got a \
list: write `(batch,)` for a single argument.
  """
  if not isinstance(batch, tuple):
    raise TypeError(
      "`batch` must be a tuple of the arguments after `params`, got a "
      f"{type(batch).__name__}: write `(batch,)` for a single argument."
    )


def check_platform(platform: Any) -> None:
  """Raises unless `platform` is a `perfmodel.Platform`."""
  if not isinstance(platform, perfmodel.Platform):
    raise TypeError(
      f"`platform` must be a perfmodel.Platform, got {platform!r}: see "
      "perfmodel.builtin_platform and perfmodel.load_platform."
    )


def check_call(
  names: tuple[str, str, str],
  fn: Callable[..., Any],
  params: Any,
  batch: tuple[Any, ...],
) -> None:
  """Raises unless a function can be traced with its arguments."""
  name, params_name, batch_name = names
  core.check_callable(name, fn)
  core.check_arrays(params_name, params)
  core.check_arrays(batch_name, batch)
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
  """Raises unless `value` is a positive, finite number.

  Args:
    name: the argument's name, for the message.
    value: what the caller gave. A NumPy float64 is allowed: measured times
      are often medians of arrays.
    most: greatest number allowed.

  Raises:
    TypeError: not a number.
    ValueError: not positive, or not finite.

  >>> check_positive("step_s", 0.0)
  Traceback (most recent call last):
  ...
  ValueError: `step_s` must be a number in (0, inf), got 0.0.
  """
  value = float(value) if isinstance(value, float) else value
  core.check_number(name, value, 0, most, open_low=True)
