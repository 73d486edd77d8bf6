"""Cases: slowdowns, ways to deal the data, ways to share the work, a model."""

import dataclasses
from typing import NamedTuple

from ml_collections import ConfigDict

from experiments.common.console import JobError

WORKERS = 4

SCENARIOS = {
  "one_2x": ((1, 1, 1, 2),),
  "one_4x": ((1, 1, 1, 4),),
  "changing": ((1, 1, 1, 4), (2, 1, 1, 1)),
}
"""Factors by which workers are slowed, by phase; phases are equally long."""

DEALS = ("shuffled", "by_class")
"""Ways to deal the examples: to any worker, or to each its own classes."""


class Case(NamedTuple):
  """A way to share the work and to average the gradients."""

  split: str  # "equal", "measured" (once, before training) or "rebalanced".
  # Whether gradients are weighted by numbers of examples; otherwise the mean of
  # the workers' means is taken.
  weighted: bool


CASES = {
  "equal": Case("equal", True),
  "uneven_plain_mean": Case("measured", False),
  "uneven_weighted": Case("measured", True),
  "rebalanced": Case("rebalanced", True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Settings of a whole experiment."""

  scenarios: tuple[str, ...] = tuple(SCENARIOS)  # Names of slowdowns.
  deals: tuple[str, ...] = DEALS  # Names of ways to deal the data.
  seeds: tuple[int, ...] = (0, 1, 2)  # Seeds of initial parameters and batches.
  steps: int = 100  # Number of steps of each run.
  total: int = 28  # Number of microbatches in a step, over all workers.
  microbatch: int = 4  # Number of examples in a microbatch.
  # Number of steps after every change of speed that medians leave out.
  settle: int = 15
  # Output channels of each convolution of the model.
  channels: tuple[int, ...] = (16, 32)
  hidden: int = 64  # Width of the model's layer before the classifier.
  learning_rate: float = 0.05  # Peak of the learning rate.
  # Number of batches that moments of gradients are taken over.
  draws: int = 400

  def __post_init__(self) -> None:
    if self.steps <= 2 * self.settle:
      raise JobError(
        f"`steps` must be more than twice `settle` = {self.settle}, got"
        f" {self.steps}."
      )

  @property
  def batch_size(self) -> int:
    """Number of examples in a step, over all workers."""
    return self.total * self.microbatch

  def make_config(self) -> ConfigDict:
    """Returns the settings as a configuration of `experiments.train`."""
    return ConfigDict(
      dict(
        model="cnn",
        data="digits",
        data_dir="",
        channels=self.channels,
        hidden=self.hidden,
        batch_size=self.batch_size,
        steps=self.steps,
        warmup_steps=self.steps // 10,
        optimizer="sgd",
        learning_rate=self.learning_rate,
        momentum=0.9,
        weight_decay=2e-3,
      )
    )


def find_slowdowns(scenario: str, step: int, steps: int) -> tuple[int, ...]:
  """Returns the factor by which each worker is slowed at a step."""
  phases = SCENARIOS[scenario]
  return phases[min(step * len(phases) // steps, len(phases) - 1)]
