"""Parts that several presets are made of."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, core, transforms
from jaxmotion.collectives.extend import (
  NONFINITE_POLICIES,
  zero_nonfinite,
)
from jaxmotion.core import Array, AxisName


def guard_nonfinite(
  tx: optax.GradientTransformation, policy: str, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
  """Applies a policy for non-finite gradients to a whole chain."""
  # A NaN would stay in a momentum that each worker keeps before the exchange.
  core.check_choice("nonfinite", policy, NONFINITE_POLICIES)
  if policy == "skip":
    return transforms.skip_nonfinite(tx, axis_name, wait=True)
  if policy == "zero":
    tx = optax.chain(
      optax.stateless(lambda updates, params: zero_nonfinite(updates)), tx
    )
  return optax.with_extra_args_support(tx)


def check_rate(name: str, value: Any, *, schedule: bool = True) -> None:
  """Raises unless a rate is a number >= 0, a scalar or a schedule."""
  if isinstance(value, jax.Array):
    core.check_float(name, value)
    if jnp.ndim(value):
      raise ValueError(
        f"`{name}` must be a scalar, got shape {jnp.shape(value)}."
      )
  elif not schedule or not callable(value) or isinstance(value, type):
    core.check_number(name, value, 0)


def scale_by_rate(
  learning_rate: optax.ScalarOrSchedule,
) -> optax.GradientTransformation:
  """Multiplies updates by the learning rate, without changing their sign."""
  return optax.scale_by_learning_rate(learning_rate, flip_sign=False)


def decay_weights(
  weight_decay: float | Array,
) -> optax.GradientTransformation:
  """Adds decayed weights, which need parameters unless the decay is zero."""
  if isinstance(weight_decay, int | float) and not weight_decay:
    return optax.identity()
  return optax.add_decayed_weights(weight_decay)


def take_signs() -> optax.GradientTransformation:
  """Replaces updates by their signs, zeros by zeros."""
  return optax.stateless(
    lambda updates, params: jax.tree.map(jnp.sign, updates)
  )


def make_nesterov(
  axis_name: AxisName,
  codec: codecs.Codec | None,
  rate: float,
  momentum: float,
  method: str | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Makes the outer chain of local updates: an exchange, then Nesterov's
  SGD."""
  core.check_number("outer_rate", rate, 0, open_low=True)
  core.check_number("outer_momentum", momentum, 0, 1, open_high=True)
  nesterov = optax.sgd(rate, momentum=momentum, nesterov=True)
  sent = transforms.exchange(axis_name, codec, method=method)
  return optax.chain(sent, nesterov)


def refuse_options(
  preset: str, scheme: str, names: Iterable[str], options: Mapping[str, Any]
) -> None:
  """Raises if options that a preset sets itself are given to it."""
  for name in names:
    if name in options:
      raise TypeError(
        f"`{name}` must not be given to `{preset}`, which sets it, got "
        f"{options[name]!r}: call `{scheme}` for others."
      )
