"""From runs to rows."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.common import records
from experiments.common.records import Row
from experiments.hetero.cases import SCENARIOS, WORKERS, Settings
from experiments.hetero.gradients import Gradients
from experiments.hetero.trainer import Run

BASELINE = "equal"
EMULATED = "ms (emulated: workers timed in turns)"

Found = dict[str, tuple[float, str, float | None]]


class Times(NamedTuple):
  """Medians over the steps at which shares have settled, of one run.

  Attributes:
    work_ms: the slowest worker's.
    update_ms: of exchange and optimiser.
    step_ms: of both.
    ideal_ms: of the work if shares were those of the speeds, exactly.
    ideal_ratio: work over ideal; of several phases, the worst.
    balance_ratio: the same of the greatest of the workers' medians, which the
      noise of single steps does not lengthen.
  """

  work_ms: float
  update_ms: float
  step_ms: float
  ideal_ms: float
  ideal_ratio: float
  balance_ratio: float


def times(run: Run, equal: Run, settings: Settings) -> Times:
  """Times of a run.

  Args:
    run: of any case.
    equal: that of equal shares beside it, which tells the workers' speeds.
    settings: of the experiment.
  """
  work, update, ideal, ratios, balance = [], [], [], [], []
  for phase in phases(run.scenario, settings):
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


def phases(scenario: str, settings: Settings) -> list[slice]:
  """The steps of every phase at which shares have settled."""
  count = len(SCENARIOS[scenario])
  ends = [settings.steps * (i + 1) // count for i in range(count)]
  return [
    slice(begin + settings.settle, end)
    for begin, end in zip([0, *ends], ends, strict=False)
  ]


def make_rows(
  settings: Settings,
  runs: Sequence[Run],
  gradients: dict[str, dict[str, Gradients]],
  ratio: float,
) -> list[Row]:
  """Everything that was found, as rows.

  Args:
    settings: of the experiment.
    runs: one for each scenario, deal, case and seed.
    gradients: moments of each mean, for each way to deal the data.
    ratio: of the variances, as predicted for shuffled data.
  """
  groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
  for run in runs:
    cases = groups.setdefault((run.scenario, run.deal), {})
    cases.setdefault(run.case, []).append(run)
  rows = []
  for (scenario, deal), cases in groups.items():
    found = {
      case: _measured(of_case, cases[BASELINE], settings)
      for case, of_case in cases.items()
    }
    rows += _to_rows(f"hetero_{scenario}_{deal}", found, BASELINE)
  for deal, means in gradients.items():
    found = {case: _of_gradient(g) for case, g in means.items()}
    if deal == "shuffled":
      found["plain_mean"]["predicted_variance_ratio"] = (ratio, "x", None)
    rows += _to_rows(f"hetero_gradient_{deal}", found, "weighted")
  return rows


def _measured(
  runs: Sequence[Run], equal: Sequence[Run], settings: Settings
) -> Found:
  """The measurements of one case over its seeds."""
  timed = [times(r, e, settings) for r, e in zip(runs, equal, strict=True)]
  found: Found = {
    "test_accuracy": _over([r.score for r in runs], "%"),
    "train_loss": _over([r.loss for r in runs], "nats"),
    # Seeds differ more than cases do: each is compared with its own.
    "loss_gap": _over(
      [r.loss - e.loss for r, e in zip(runs, equal, strict=True)], "nats"
    ),
  }
  for name in ("work_ms", "update_ms", "step_ms", "ideal_ms"):
    found[name] = _over([getattr(t, name) for t in timed], EMULATED)
  for name in ("ideal_ratio", "balance_ratio"):
    found[name] = _over([getattr(t, name) for t in timed], "T/T*")
  whole = [float((r.seconds.max(axis=1) + r.update_s).sum()) for r in runs]
  found["train_s"] = _over(whole, EMULATED.replace("ms", "s"))
  found["moves"] = _over([float(r.moves) for r in runs], "changes of shares")
  last = phases(runs[0].scenario, settings)[-1]
  for worker in range(WORKERS):
    shares = [float(np.median(r.counts[last, worker])) for r in runs]
    found[f"microbatches_{worker}"] = _over(shares, "microbatches/step")
    speed = [
      settings.microbatch
      * float(np.median(r.counts[last, worker] / r.seconds[last, worker]))
      for r in runs
    ]
    found[f"throughput_{worker}"] = _over(speed, "examples/s (emulated)")
  return found


def _of_gradient(found: Gradients) -> Found:
  return {
    "gradient_bias": (found.bias, "of the full gradient", found.bias_noise),
    "gradient_variance": (found.variance, "of its squared norm", None),
  }


def _over(values: list[float], unit: str) -> tuple[float, str, float | None]:
  """The mean over seeds and its spread."""
  spread = statistics.stdev(values) if len(values) > 1 else None
  return statistics.fmean(values), unit, spread


def _to_rows(
  experiment: str, found: dict[str, Found], baseline: str
) -> list[Row]:
  stamp = (records.describe_machine(), jax.__version__)
  rows = []
  for case, measured in found.items():
    for metric, (value, unit, noise) in measured.items():
      base = found[baseline].get(metric, (None,))[0]
      ratio = value / base if base else None
      row = Row(
        experiment, case, metric, value, unit, base, ratio, noise, *stamp
      )
      rows.append(row)
  return rows
