"""Rows of the study: scores at equal steps, equal bytes and equal time."""

import itertools
import math
import statistics
from collections.abc import Sequence

import jax
from ml_collections import ConfigDict

from experiments.common import records
from experiments.study import trainer
from experiments.train import tasks

BASELINE = "fp32"
DIVERGED = "diverged"
_CLOSE = 0.05  # Times of equal programs differ by as much.
_EMULATED = "ms (emulated)"
_PREDICTED = "ms (predicted)"

Found = dict[str, tuple[float | str, str, float | None]]
"""Value, unit and noise by metric."""

Curve = list[tuple[float, float]]
"""Cost of a whole run and its mean score, the cheapest run first."""


def make_rows(
  config: ConfigDict, task: tasks.Task, runs: Sequence[trainer.StudyRun]
) -> list[records.Row]:
  """Returns the rows of all runs so far, an algorithm after the other."""
  cases = {}
  for name in config.algorithms:
    own = [run for run in runs if run.trial.algorithm == name]
    if any(run.trial.seed in config.seeds for run in own):
      cases[name] = own
  measured = {
    name: _measure_algorithm(config, task, own) for name, own in cases.items()
  }
  if BASELINE in cases:
    budgets = _list_costs(config, cases[BASELINE])
    for name, own in cases.items():
      measured[name] |= _score_budgets(config, task, own, budgets)
  base = measured.get(BASELINE, {})
  stamp = (records.describe_machine(), jax.__version__)
  rows = []
  for name, found in measured.items():
    for metric, (value, unit, noise) in found.items():
      baseline = ratio = None
      if metric in base and not isinstance(base[metric][0], str):
        baseline = float(base[metric][0])
      if baseline and not isinstance(value, str):
        ratio = value / baseline
      key = (f"study_{config.experiment}", name, metric)
      rows.append(
        records.Row(*key, value, unit, baseline, ratio, noise, *stamp)
      )
  return rows


def score_at(curve: Curve, budget: float) -> float | None:
  """Returns the score that a cost buys, linear in the cost's logarithm."""
  if not curve or budget < curve[0][0] * (1 - _CLOSE):
    return None
  for (low, worse), (high, better) in itertools.pairwise(curve):
    if budget < high:
      share = max(0.0, math.log(budget / low)) / math.log(high / low)
      return worse + share * (better - worse)
  return curve[-1][1]


def _final_runs(
  config: ConfigDict, runs: Sequence[trainer.StudyRun]
) -> dict[int, list[trainer.StudyRun]]:
  """Returns the runs of the study's seeds by length, the longest first."""
  found: dict[int, list[trainer.StudyRun]] = {}
  for length in sorted(config.lengths, reverse=True):
    own = [
      run
      for run in runs
      if run.trial.steps == length and run.trial.seed in config.seeds
    ]
    if own:
      found[length] = own
  return found


def _step_ms(runs: Sequence[trainer.StudyRun]) -> float:
  """Returns the time of a step when other programs lengthened it least."""
  return min(run.step_ms for run in runs)


def _measure_algorithm(
  config: ConfigDict, task: tasks.Task, runs: Sequence[trainer.StudyRun]
) -> Found:
  """Returns scores of each length, the chosen rates, bytes and times."""
  found: Found = {}
  finals = _final_runs(config, runs)
  for length, own in finals.items():
    scores = [run.score for run in own if run.score is not None]
    value: float | str = DIVERGED
    if len(scores) == len(own):
      value = statistics.fmean(scores)
    noise = statistics.stdev(scores) if len(scores) > 1 else None
    found[f"{task.metric}_{length}"] = (value, task.unit, noise)
  last = next(iter(finals.values()))
  chosen = last[0]
  losses = [run.loss for run in last if run.loss is not None]
  loss = statistics.fmean(losses) if len(losses) == len(last) else DIVERGED
  found["loss"] = (loss, "nats", None)
  found["seeds"] = (len(last), "runs", None)
  found["rate"] = (chosen.trial.rate, "1", None)
  if chosen.trial.outer_rate is not None:
    found["outer_rate"] = (chosen.trial.outer_rate, "1", None)
  trials = [run for run in runs if run.trial.seed == config.trial_seed]
  found["trials"] = (
    ", ".join(map(_describe_trial, trials)),
    f"{task.unit} at learning rates, {config.trial_steps} steps",
    None,
  )
  found["wire_bytes"] = (chosen.wire_bytes, "bytes/step/worker", None)
  found["step_ms"] = (_step_ms(runs), _EMULATED, None)
  for link, ms in zip(trainer.LINKS, chosen.link_ms, strict=True):
    found[f"link_ms_{link}"] = (ms, _PREDICTED, None)
  return found


def _describe_trial(run: trainer.StudyRun) -> str:
  _, _, _, *rates = run.trial
  tried = "/".join(f"{rate:.3g}" for rate in rates if rate is not None)
  score = DIVERGED if run.score is None else f"{run.score:.4g}"
  return f"{tried}: {score}"


def _list_costs(
  config: ConfigDict, runs: Sequence[trainer.StudyRun]
) -> dict[str, dict[int, float]]:
  """Returns what runs of each length cost: bytes, and seconds on each link."""
  step_ms = _step_ms(runs)
  costs: dict[str, dict[int, float]] = {}
  for length, (first, *_) in sorted(_final_runs(config, runs).items()):
    costs.setdefault("bytes", {})[length] = length * first.wire_bytes
    for link, ms in zip(trainer.LINKS, first.link_ms, strict=True):
      seconds = length * (step_ms + ms) / 1e3
      costs.setdefault(f"time_{link}", {})[length] = seconds
  return costs


def _score_budgets(
  config: ConfigDict,
  task: tasks.Task,
  runs: Sequence[trainer.StudyRun],
  budgets: dict[str, dict[int, float]],
) -> Found:
  """Returns an algorithm's costs, and its scores for those of the baseline."""
  finals = _final_runs(config, runs)
  found: Found = {}
  for kind, costs in _list_costs(config, runs).items():
    unit = "bytes" if kind == "bytes" else "s (emulated and predicted)"
    curve: Curve = []
    for length, cost in costs.items():
      found[f"cost_{kind}_{length}"] = (cost, unit, None)
      scores = [run.score for run in finals[length] if run.score is not None]
      if len(scores) == len(finals[length]):
        curve.append((cost, statistics.fmean(scores)))
    for length, budget in list(budgets[kind].items())[:-1]:
      score = score_at(curve, budget)
      if score is not None:
        name = f"{task.metric}_equal_{kind}_{length}"
        found[name] = (score, f"{task.unit} (interpolated)", None)
  return found
