"""Optimizers that a configuration can name."""

import optax
from ml_collections import ConfigDict

from experiments.common.console import JobError
from experiments.train.presets import Settings


def make_settings(
  config: ConfigDict, schedule: optax.Schedule | None = None
) -> Settings:
  """Returns what presets take of a configuration."""
  return Settings(
    schedule or _make_schedule(config),
    config.momentum,
    config.optimizer == "sgd",
    config.weight_decay,
    config.steps,
  )


def make_optimizer(
  config: ConfigDict, schedule: optax.Schedule | None = None
) -> optax.GradientTransformation:
  """Returns the optimizer, with a learning rate that ends at zero."""
  schedule = schedule or _make_schedule(config)
  match config.optimizer:
    case "adamw":
      return optax.adamw(
        schedule, b1=config.momentum, weight_decay=config.weight_decay
      )
    case "sgd" | "momentum":
      nesterov = config.optimizer == "sgd"
      return optax.chain(
        optax.add_decayed_weights(config.weight_decay),
        optax.sgd(schedule, momentum=config.momentum, nesterov=nesterov),
      )
  raise JobError(
    "`config.optimizer` must be adamw, sgd or momentum, got"
    f" {config.optimizer!r}."
  )


def _make_schedule(config: ConfigDict) -> optax.Schedule:
  if not 0 <= config.warmup_steps < config.steps:
    raise JobError(
      "`config.warmup_steps` must be at least 0 and less than `config.steps` ="
      f" {config.steps}, got {config.warmup_steps}."
    )
  return optax.warmup_cosine_decay_schedule(
    0.0, config.learning_rate, config.warmup_steps, config.steps
  )
