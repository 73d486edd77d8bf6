"""Tables of unequal workers: time and accuracy, and moments of gradients."""

from collections.abc import Sequence

from experiments.common import records, tables
from experiments.hetero import cases

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
Cells = dict[tuple[str, str, str], records.Row]


def index_experiments(rows: Sequence[records.Row]) -> Cells:
  """Returns the rows by experiment, case and metric."""
  return {(r.experiment, r.case, r.metric): r for r in rows}


def list_experiments(rows: Sequence[records.Row]) -> list[str]:
  """Returns the names of the experiments that trained, in order."""
  names = [r.experiment for r in rows if r.metric == "step_ms"]
  return list(dict.fromkeys(names))


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns time and accuracy, a line for each scenario, deal and case."""
  found = index_experiments(rows)
  return tables.Table(
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


def gradient_table(rows: Sequence[records.Row]) -> tables.Table:
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
  return tables.Table(
    ("data", "mean", "bias", "variance", "to weighted", "predicted"),
    lines,
    title="Mean of the workers' gradients, at the initial parameters",
    caption="Bias relative to the gradient of all images; in brackets the bias"
    " that an unbiased estimate would show over as many draws.",
    text_columns=(0, 1),
  )
