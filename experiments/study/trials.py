"""Trials of learning rates: the same number for every algorithm."""

from collections.abc import Callable

from ml_collections import ConfigDict

from experiments.study.cases import ALGORITHMS
from experiments.study.trainer import StudyRun, Trial


def choose_rates(
  config: ConfigDict,
  name: str,
  run: Callable[[Trial], StudyRun],
  *,
  higher: bool,
) -> StudyRun:
  """Returns the best of an algorithm's trials.

  Three learning rates are tried, then two more settings of the best of them:
  other outer learning rates for local updates, rates in between for all others.

  Args:
    config: configuration of the study.
    name: name of the algorithm.
    run: runs a trial.
    higher: whether higher scores are better.
  """
  algorithm = ALGORITHMS[name]
  base = config.base_rates[algorithm.optimizer or config.optimizer]
  outer = algorithm.outer_rate

  def try_rates(rate: float, outer_rate: float | None) -> StudyRun:
    seed, steps = config.trial_seed, config.trial_steps
    return run(Trial(name, seed, steps, rate, outer_rate))

  def rank(found: StudyRun) -> tuple[float, float]:
    if found.score is None or found.loss is None:
      return float("inf"), float("inf")
    # Scores of few examples are often equal: then the training loss decides.
    return (-found.score if higher else found.score), found.loss

  factors = 1.0, 1 / config.coarse, config.coarse
  best = min((try_rates(base * f, outer) for f in factors), key=rank)
  others = [
    try_rates(best.rate * f, None)
    if outer is None
    else try_rates(best.rate, outer * f)
    for f in (1 / config.fine, config.fine)
  ]
  return min([best, *others], key=rank)
