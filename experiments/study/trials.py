"""Trials of learning rates: by the same rule for every algorithm."""

from collections.abc import Callable

from ml_collections import ConfigDict

from experiments.study import cases, trainer


def choose_rates(
  config: ConfigDict,
  name: str,
  run: Callable[[trainer.Trial], trainer.StudyRun],
  *,
  higher: bool,
) -> trainer.StudyRun:
  """Returns the best of an algorithm's trials."""
  # Three learning rates are tried, then both neighbors of the best of them:
  # other outer learning rates for local updates, rates in between for all
  # others. As long as the best is the least or the greatest that was tried, the
  # next one beyond it is tried, at most `config.further` times.
  algorithm = cases.ALGORITHMS[name]
  base = config.base_rates[algorithm.optimizer or config.optimizer]
  is_local = algorithm.outer_rate is not None

  def try_rates(rate: float, outer_rate: float | None) -> trainer.StudyRun:
    seed, steps = config.trial_seed, config.trial_steps
    return run(trainer.Trial(name, seed, steps, rate, outer_rate))

  def rank(found: trainer.StudyRun) -> tuple[float, float]:
    if found.score is None or found.loss is None:
      return float("inf"), float("inf")
    # Scores of few examples are often equal: then the training loss decides.
    return (-found.score if higher else found.score), found.loss

  def knob(found: trainer.StudyRun) -> float:
    trial = found.trial
    return trial.rate if trial.outer_rate is None else trial.outer_rate

  def scale(found: trainer.StudyRun, factor: float) -> trainer.StudyRun:
    _, _, _, rate, outer_rate = found.trial
    if outer_rate is None:
      return try_rates(rate * factor, None)
    return try_rates(rate, outer_rate * factor)

  tried = [
    try_rates(base * factor, algorithm.outer_rate)
    for factor in (1.0, 1 / config.coarse, config.coarse)
  ]
  best = min(tried, key=rank)
  tried = [best] if is_local else tried
  tried += [scale(best, 1 / config.fine), scale(best, config.fine)]
  for _ in range(config.further):
    best = min(tried, key=rank)
    if knob(best) == min(map(knob, tried)):
      tried.append(scale(best, 1 / config.fine))
    elif knob(best) == max(map(knob, tried)):
      tried.append(scale(best, config.fine))
  return min(tried, key=rank)
