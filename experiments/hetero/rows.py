"""Rows of runs: times, accuracy and shares of each case, and gradients."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.common import records
from experiments.hetero import trainer
from experiments.hetero.cases import SCENARIOS, WORKERS, Settings
from experiments.hetero.gradients import Gradients

BASELINE = "equal"
EMULATED = "ms (emulated: workers timed in turns)"

Found = dict[str, tuple[float, str, float | None]]


class Times(NamedTuple):
  """Median times of one run, over the steps at which shares have settled.

  Attributes:
    work_ms: time of the slowest worker.
    update_ms: time of exchange and optimizer.
    step_ms: time of both.
    ideal_ms: time of the work if shares were exactly by speed.
    ideal_ratio: work over ideal; the greatest of all phases.
    balance_ratio: greatest of the workers' medians over ideal, which the noise
      of single steps does not lengthen.
  """

  work_ms: float
  update_ms: float
  step_ms: float
  ideal_ms: float
  ideal_ratio: float
  balance_ratio: float


def summarize_times(
  run: trainer.Run, equal: trainer.Run, settings: Settings
) -> Times:
  """Returns the median times of a run."""
  work, update, ideal, ratios, balance = [], [], [], [], []
  for phase in settled_phases(run.scenario, settings):
    took = np.median(equal.seconds[phase], axis=0)
    speeds = equal.counts[phase][0] / took
    best = settings.total / speeds.sum()
    slowest = run.seconds[phase].max(axis=1)
    work.append(slowest)
    update.append(run.update_s[phase])
    ideal.append(best)
    ratios.append(np.median(slowest) / best)
    balance.append(np.median(run.seconds[phase], axis=0).max() / best)
  slowest, sent = np.concatenate(work), np.concatenate(update)
  return Times(
    1e3 * float(np.median(slowest)),
    1e3 * float(np.median(sent)),
    1e3 * float(np.median(slowest + sent)),
    1e3 * float(np.mean(ideal)),
    float(max(ratios)),
    float(max(balance)),
  )


def settled_phases(scenario: str, settings: Settings) -> list[slice]:
  """Returns the steps of every phase at which shares have settled."""
  count = len(SCENARIOS[scenario])
  ends = [settings.steps * (i + 1) // count for i in range(count)]
  return [
    slice(begin + settings.settle, end)
    for begin, end in zip([0, *ends], ends, strict=False)
  ]


def make_rows(
  settings: Settings,
  runs: Sequence[trainer.Run],
  gradients: dict[str, dict[str, Gradients]],
  ratio: float,
) -> list[records.Row]:
  """Returns the rows of all runs and of the moments of gradients."""
  groups: dict[tuple[str, str], dict[str, list[trainer.Run]]] = {}
  for run in runs:
    cases = groups.setdefault((run.scenario, run.deal), {})
    cases.setdefault(run.case, []).append(run)
  rows = []
  for (scenario, deal), cases in groups.items():
    found = {
      case: _measure_case(of_case, cases[BASELINE], settings)
      for case, of_case in cases.items()
    }
    rows += _make_case_rows(f"hetero_{scenario}_{deal}", found, BASELINE)
  for deal, means in gradients.items():
    found = {case: _list_moments(g) for case, g in means.items()}
    if deal == "shuffled":
      found["plain_mean"]["predicted_variance_ratio"] = (ratio, "x", None)
    rows += _make_case_rows(f"hetero_gradient_{deal}", found, "weighted")
  return rows


def _measure_case(
  runs: Sequence[trainer.Run], equal: Sequence[trainer.Run], settings: Settings
) -> Found:
  """Returns the measurements of one case over its seeds."""
  timed = [
    summarize_times(r, e, settings) for r, e in zip(runs, equal, strict=True)
  ]
  found: Found = {
    "test_accuracy": _average_seeds([r.score for r in runs], "%"),
    "train_loss": _average_seeds([r.loss for r in runs], "nats"),
    # Seeds differ more than cases do: compare each run with its own seed.
    "loss_gap": _average_seeds(
      [r.loss - e.loss for r, e in zip(runs, equal, strict=True)], "nats"
    ),
  }
  for name in ("work_ms", "update_ms", "step_ms", "ideal_ms"):
    found[name] = _average_seeds([getattr(t, name) for t in timed], EMULATED)
  for name in ("ideal_ratio", "balance_ratio"):
    found[name] = _average_seeds([getattr(t, name) for t in timed], "T/T*")
  whole = [float((r.seconds.max(axis=1) + r.update_s).sum()) for r in runs]
  found["train_s"] = _average_seeds(whole, EMULATED.replace("ms", "s"))
  found["moves"] = _average_seeds(
    [float(r.moves) for r in runs], "changes of shares"
  )
  last = settled_phases(runs[0].scenario, settings)[-1]
  for worker in range(WORKERS):
    shares = [float(np.median(r.counts[last, worker])) for r in runs]
    found[f"microbatches_{worker}"] = _average_seeds(
      shares, "microbatches/step"
    )
    speed = [
      settings.microbatch
      * float(np.median(r.counts[last, worker] / r.seconds[last, worker]))
      for r in runs
    ]
    found[f"throughput_{worker}"] = _average_seeds(
      speed, "examples/s (emulated)"
    )
  return found


def _list_moments(found: Gradients) -> Found:
  return {
    "gradient_bias": (found.bias, "of the full gradient", found.bias_noise),
    "gradient_variance": (found.variance, "of its squared norm", None),
  }


def _average_seeds(
  values: list[float], unit: str
) -> tuple[float, str, float | None]:
  """Returns the mean over seeds, the unit and the standard deviation."""
  spread = statistics.stdev(values) if len(values) > 1 else None
  return statistics.fmean(values), unit, spread


def _make_case_rows(
  experiment: str, found: dict[str, Found], baseline: str
) -> list[records.Row]:
  stamp = (records.describe_machine(), jax.__version__)
  rows = []
  for case, measured in found.items():
    for metric, (value, unit, noise) in measured.items():
      base = found[baseline].get(metric, (None,))[0]
      ratio = value / base if base else None
      row = records.Row(
        experiment, case, metric, value, unit, base, ratio, noise, *stamp
      )
      rows.append(row)
  return rows
