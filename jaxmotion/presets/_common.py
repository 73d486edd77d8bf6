"""Parts of presets: the planner's facts, checks of rates, non-finite policy."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core, transforms
from jaxmotion.collectives.extend import NONFINITE_POLICIES, zero_nonfinite
from jaxmotion.core import AxisName

_Preset = TypeVar("_Preset", bound=Callable[..., Any])


class Facts(NamedTuple):
  """Facts that the planner must know of a preset, its attribute `facts`."""

  # What it changes about training. `{every}` stands for the steps between two
  # exchanges of a scheme.
  note: str
  # What it assumes, by the planner's name for it. The planner adds what breaks
  # the assumption to these words.
  assumes: Mapping[str, str]


def note_facts(note: str, **assumes: str) -> Callable[[_Preset], _Preset]:
  """Makes a decorator that says what the planner must know of a preset."""

  def decorate(preset: _Preset) -> _Preset:
    preset.facts = Facts(note, assumes)  # type: ignore[attr-defined]
    return preset

  return decorate


def guard_nonfinite(
  tx: optax.GradientTransformation, policy: str, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
  """Applies a policy for non-finite gradients to a whole chain."""
  # A NaN would stay in a momentum that each worker keeps before the exchange.
  core.check_choice("nonfinite", policy, NONFINITE_POLICIES)
  if policy == "skip":
    return transforms.skip_nonfinite(tx, axis_name, wait=True)
  if policy == "zero":
    zero = optax.stateless(lambda updates, params: zero_nonfinite(updates))
    tx = optax.chain(zero, tx)
  return optax.with_extra_args_support(tx)


def check_rates(learning_rate: Any, weight_decay: Any) -> None:
  """Raises unless rates are numbers >= 0 or scalars, or one is a schedule."""
  is_schedule = callable(learning_rate) and not isinstance(learning_rate, type)
  rates = {"learning_rate": learning_rate, "weight_decay": weight_decay}
  for name, value in rates.items():
    if isinstance(value, jax.Array):
      core.check_float(name, value)
      if jnp.ndim(value):
        raise ValueError(
          f"`{name}` must be a scalar, got shape {jnp.shape(value)}."
        )
    elif name != "learning_rate" or not is_schedule:
      core.check_number(name, value, 0)
