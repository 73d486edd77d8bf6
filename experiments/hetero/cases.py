"""What is run: a model, slowdowns, ways to deal the data, ways to split it."""

import dataclasses
from typing import NamedTuple

from ml_collections import ConfigDict

WORKERS = 4

# By which factor each worker is slowed; phases take equal parts of a run.
SCENARIOS = {
  "one_2x": ((1, 1, 1, 2),),
  "one_4x": ((1, 1, 1, 4),),
  "changing": ((1, 1, 1, 4), (2, 1, 1, 1)),
}

# Whom the examples go to: anyone, or each worker its own classes.
DEALS = ("shuffled", "by_class")


class Case(NamedTuple):
  """One of the ways that are compared.

  Attributes:
    split: "equal", "measured" (once, before training) or "rebalanced".
    weighted: whether gradients are weighted by what counts, or a plain mean
      is taken of the workers' means.
  """

  split: str
  weighted: bool


CASES = {
  "equal": Case("equal", True),
  "uneven_plain_mean": Case("measured", False),
  "uneven_weighted": Case("measured", True),
  "rebalanced": Case("rebalanced", True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """Of a whole experiment.

  Attributes:
    scenarios: names of slowdowns.
    deals: names of ways to deal the data.
    seeds: of initial parameters and batches.
    steps: of each run.
    total: microbatches a step, over all workers.
    microbatch: examples a microbatch.
    settle: steps after every change of speed that medians leave out.
    channels: outputs of each convolution of the model.
    hidden: width of the model's layer before the classifier.
    learning_rate: at its peak.
    draws: batches that a gradient's mean and variance are taken over.
  """

  scenarios: tuple[str, ...] = tuple(SCENARIOS)
  deals: tuple[str, ...] = DEALS
  seeds: tuple[int, ...] = (0, 1, 2)
  steps: int = 100
  total: int = 28
  microbatch: int = 4
  settle: int = 15
  channels: tuple[int, ...] = (16, 32)
  hidden: int = 64
  learning_rate: float = 0.05
  draws: int = 400

  def __post_init__(self) -> None:
    for name, chosen, known in (
      ("scenarios", self.scenarios, SCENARIOS),
      ("deals", self.deals, DEALS),
    ):
      for value in chosen:
        if value not in known:
          raise ValueError(
            f"`{name}` must name some of {', '.join(known)}, got {value!r}."
          )
    if self.steps <= 2 * self.settle:
      raise ValueError(
        f"`steps` must be more than twice `settle` = {self.settle}, got"
        f" {self.steps}."
      )

  @property
  def batch_size(self) -> int:
    """Examples a step, over all workers."""
    return self.total * self.microbatch

  def config(self) -> ConfigDict:
    """The same as other runners' parts want it."""
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


def slowdowns(scenario: str, step: int, steps: int) -> tuple[int, ...]:
  """By which factor each worker is slowed at a step."""
  phases = SCENARIOS[scenario]
  return phases[min(step * len(phases) // steps, len(phases) - 1)]
