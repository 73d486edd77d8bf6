"""Published algorithms that a configuration can name as exchanges.

Some stand before the optimizer of the configuration. Others are optimizers
themselves, and take its learning rate, momentum and weight decay.
"""

from collections.abc import Callable
from typing import NamedTuple

import optax

from jaxmotion import presets
from jaxmotion.core import AxisName


class Settings(NamedTuple):
  """Fields of a configuration that presets take."""

  learning_rate: optax.ScalarOrSchedule = 0.1  # Number or schedule.
  momentum: float = 0.9  # Factor on the momentum.
  nesterov: bool = False  # Whether SGD takes Nesterov's step.
  weight_decay: float = 0.0  # In units of the learning rate.
  steps: int = 0  # Steps of the run; a tenth of them are a warm-up. 0 for none.


class Place(NamedTuple):
  """Axes of the workers, and what stands on them."""

  axis_name: AxisName  # The workers' axis, or `HostAxes`.
  optimizer: optax.GradientTransformation  # Optimizer of the configuration.
  settings: Settings  # Fields of the configuration.

  @property
  def warmup(self) -> int:
    """Number of steps of a warm-up."""
    return self.settings.steps // 10

  def plain_sgd(self) -> optax.GradientTransformation:
    """Returns SGD without momentum, for exchanges that have one."""
    return optax.chain(
      optax.add_decayed_weights(self.settings.weight_decay),
      optax.sgd(self.settings.learning_rate),
    )


def _power_sgd(
  form: str, rank: int = 4
) -> Callable[[Place], optax.GradientTransformation]:
  # One index of `wire.step_bytes` names a turn or the start, not one in the
  # other: turns begin at the first step.
  in_turns = form == "alternating"

  def make(p: Place) -> optax.GradientTransformation:
    tx = presets.power_sgd(
      p.axis_name, rank=rank, start=0 if in_turns else p.warmup, form=form
    )
    return optax.chain(tx, p.optimizer)

  return make


def _dgc(p: Place) -> optax.GradientTransformation:
  tx = presets.dgc(
    p.axis_name,
    density=0.01,
    momentum=p.settings.momentum,
    nesterov=p.settings.nesterov,
    warmup=p.warmup,
  )
  return optax.chain(tx, p.plain_sgd())


def _ef21_sgdm(p: Place) -> optax.GradientTransformation:
  tx = presets.ef21_sgdm(p.axis_name, momentum=p.settings.momentum)
  # The average is (1 - momentum) of the sum that SGD with momentum takes.
  scale = optax.scale(1 / (1 - p.settings.momentum))
  return optax.chain(tx, scale, p.plain_sgd())


def _onebit_adam(p: Place) -> optax.GradientTransformation:
  return presets.onebit_adam(
    p.axis_name,
    p.settings.learning_rate,
    b1=p.settings.momentum,
    weight_decay=p.settings.weight_decay,
    freeze=max(1, 2 * p.warmup),
  )


def _optimizer(
  preset: Callable[..., optax.GradientTransformation],
  name: str | None = None,
) -> Callable[[Place], optax.GradientTransformation]:
  """Makes an optimizer whose argument of this name is the momentum."""

  def make(p: Place) -> optax.GradientTransformation:
    return preset(
      p.axis_name,
      p.settings.learning_rate,
      weight_decay=p.settings.weight_decay,
      **({name: p.settings.momentum} if name else {}),
    )

  return make


ALTERNATING = "power_sgd_alternating"
"""Name of the exchange that sends one factor a step, in turns."""

PRESETS: dict[str, Callable[[Place], optax.GradientTransformation]] = {
  "power_sgd": _power_sgd("local"),
  "power_sgd_rank2": _power_sgd("local", rank=2),
  ALTERNATING: _power_sgd("alternating"),
  "dgc": _dgc,
  "ef21_sgdm": _ef21_sgdm,
  "onebit_adam": _onebit_adam,
  "demo": _optimizer(presets.demo),
  "lion": _optimizer(presets.lion),
  "signum": _optimizer(presets.signum, "momentum"),
  "sparse_loco": _optimizer(presets.sparse_loco),
  "sdp4bit": lambda p: presets.sdp4bit(p.axis_name, p.optimizer),
}
"""Makes an optimizer with its exchange, by name of the exchange."""
