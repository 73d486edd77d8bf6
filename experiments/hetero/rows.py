"""Rows and tables: times, accuracy and shares of each case, and gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.common import records, tables
from experiments.common.records import Measured, Row
from experiments.common.tables import Table
from experiments.hetero import cases
from experiments.hetero.cases import SCENARIOS, WORKERS, Settings
from experiments.hetero.gradients import Gradients
from experiments.hetero.trainer import Run

BASELINE = "equal"
EMULATED = "ms (emulated: workers timed in turns)"

Found = dict[str, Measured]


class Times(NamedTuple):
  """Median times of one run, over the steps at which shares have settled."""

  work_ms: float  # Time of the slowest worker.
  update_ms: float  # Time of exchange and optimizer.
  step_ms: float  # Time of both.
  ideal_ms: float  # Time of the work if shares were exactly by speed.
  ideal_ratio: float  # Work over ideal; the greatest of all phases.
  # Greatest of the workers' medians over ideal, which the noise of single steps
  # does not lengthen.
  balance_ratio: float


def summarize_times(run: Run, equal: Run, settings: Settings) -> Times:
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
  runs: Sequence[Run],
  gradients: dict[str, dict[str, Gradients]],
  ratio: float,
) -> list[Row]:
  """Returns the rows of all runs and of the moments of gradients."""
  groups: dict[tuple[str, str], dict[str, list[Run]]] = {}
  for run in runs:
    cases = groups.setdefault((run.scenario, run.deal), {})
    cases.setdefault(run.case, []).append(run)
  rows = []
  for (scenario, deal), cases in groups.items():
    found = {
      case: _measure_case(of_case, cases[BASELINE], settings)
      for case, of_case in cases.items()
    }
    rows += records.make_rows(
      f"hetero_{scenario}_{deal}", found, found[BASELINE]
    )
  for deal, means in gradients.items():
    found = {case: _list_moments(g) for case, g in means.items()}
    if deal == "shuffled":
      found["plain_mean"]["predicted_variance_ratio"] = Measured(ratio, "x")
    rows += records.make_rows(
      f"hetero_gradient_{deal}", found, found["weighted"]
    )
  return rows


def _measure_case(
  runs: Sequence[Run], equal: Sequence[Run], settings: Settings
) -> Found:
  """Returns the measurements of one case over its seeds."""
  average = records.average_repeats
  pairs = list(zip(runs, equal, strict=True))
  timed = [summarize_times(r, e, settings) for r, e in pairs]
  found: Found = {
    "test_accuracy": average([r.score for r in runs], "%"),
    "train_loss": average([r.loss for r in runs], "nats"),
    # Seeds differ more than cases do: compare each run with its own seed.
    "loss_gap": average([r.loss - e.loss for r, e in pairs], "nats"),
  }
  for name in ("work_ms", "update_ms", "step_ms", "ideal_ms"):
    found[name] = average([getattr(t, name) for t in timed], EMULATED)
  for name in ("ideal_ratio", "balance_ratio"):
    found[name] = average([getattr(t, name) for t in timed], "T/T*")
  whole = [float((r.seconds.max(axis=1) + r.update_s).sum()) for r in runs]
  found["train_s"] = average(whole, EMULATED.replace("ms", "s"))
  found["moves"] = average([float(r.moves) for r in runs], "changes of shares")
  last = settled_phases(runs[0].scenario, settings)[-1]
  for worker in range(WORKERS):
    shares = [float(np.median(r.counts[last, worker])) for r in runs]
    found[f"microbatches_{worker}"] = average(shares, "microbatches/step")
    speed = [
      settings.microbatch
      * float(np.median(r.counts[last, worker] / r.seconds[last, worker]))
      for r in runs
    ]
    found[f"throughput_{worker}"] = average(speed, "examples/s (emulated)")
  return found


def _list_moments(found: Gradients) -> Found:
  return {
    "gradient_bias": Measured(
      found.bias, "of the full gradient", found.bias_noise
    ),
    "gradient_variance": Measured(found.variance, "of its squared norm"),
  }


_HEADER = (
  "slowed, data",
  "case",
  "shares at the end",
  "step ms",
  "to equal",
  "T/T*",
  "of medians",
  "test accuracy, %",
  "train loss over equal",
)
Cells = dict[tuple[str, str, str], Row]


def index_experiments(rows: Sequence[Row]) -> Cells:
  """Returns the rows by experiment, case and metric."""
  return {(r.experiment, r.case, r.metric): r for r in rows}


def list_experiments(rows: Sequence[Row]) -> list[str]:
  """Returns the names of the experiments that trained, in order."""
  names = [r.experiment for r in rows if r.metric == "step_ms"]
  return list(dict.fromkeys(names))


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns time and accuracy, a line for each scenario, deal and case."""
  found = index_experiments(rows)
  return Table(
    _HEADER,
    [
      _make_line(found, name, case)
      for name in list_experiments(rows)
      for case in cases.CASES
    ],
    title=f"Unequal workers on {rows[0].machine}, JAX {rows[0].jax}",
    caption="± over seeds. Times are emulated: each worker was timed alone, in"
    " turn, on this machine's cores; a step is the slowest worker's time plus"
    " that of the exchange. T* is the time of the work split exactly by speed;"
    " T the median of the slowest worker's times, or the slowest worker's"
    " median.",
    text_columns=(0, 1),
  )


def _make_line(found: Cells, name: str, case: str) -> list[str]:
  """Returns the cells of one experiment and case."""

  def format_cell(metric: str, digits: int) -> str:
    return tables.format_noise(found[name, case, metric], digits)

  shares = [
    f"{found[name, case, f'microbatches_{i}'].value:.3g}"
    for i in range(cases.WORKERS)
  ]
  return [
    name.removeprefix("hetero_"),
    case,
    " ".join(shares),
    format_cell("step_ms", 1),
    f"{found[name, case, 'step_ms'].ratio:.2f}",
    format_cell("ideal_ratio", 2),
    format_cell("balance_ratio", 2),
    format_cell("test_accuracy", 2),
    format_cell("loss_gap", 3),
  ]


def gradient_table(rows: Sequence[Row]) -> Table:
  """Returns bias and variance of the two means of the workers' gradients."""
  found = index_experiments(rows)
  lines = []
  for name, case, metric in found:
    if metric == "gradient_bias":
      bias = found[name, case, metric]
      variance = found[name, case, "gradient_variance"]
      predicted = found.get((name, case, "predicted_variance_ratio"))
      lines.append(
        (
          name.removeprefix("hetero_gradient_"),
          case,
          f"{bias.value:.3f} ({bias.noise:.3f})",
          f"{variance.value:.3f}",
          f"{variance.ratio:.2f}",
          "" if predicted is None else f"{predicted.value:.2f}",
        )
      )
  return Table(
    ("data", "mean", "bias", "variance", "to weighted", "predicted"),
    lines,
    title="Mean of the workers' gradients, at the initial parameters",
    caption="Bias relative to the gradient of all images; in brackets the bias"
    " that an unbiased estimate would show over as many draws.",
    text_columns=(0, 1),
  )
