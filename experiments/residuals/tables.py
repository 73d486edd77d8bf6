"""Tables of residual memory and accuracy that the docs show."""

from collections.abc import Sequence

from experiments.common.records import Row
from experiments.common.tables import Table, format_gap, format_noise

_MODES = {
  "jax_checkpoint": "`jax.checkpoint`",
  "cut": "lossless",
  "cut_together": "lossless, together",
  "cut_int4": "4 bits",
  "cut_int4_together": "4 bits, together",
  "update_int4_host": "4 bits on the host",
  "everything": "everything",
}


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns the accuracy table of rows with accuracies, else the memory table.

  Args:
    rows: of `experiments.residuals` or `experiments.residuals.accuracy`.
  """
  if any(row.metric == "test_accuracy" for row in rows):
    return accuracy_table(rows)
  return memory_table(rows)


def memory_table(rows: Sequence[Row]) -> Table:
  """Returns the share of temporary memory that each mode saves.

  Args:
    rows: of `experiments.residuals`.
  """
  temp = {row.case: row for row in rows if row.metric == "temp_bytes"}
  lines = []
  for case in [c for c in temp if c.endswith("/plain") and c.count("/") == 1]:
    network = case.removesuffix("/plain")
    line = [
      network.replace("_batch", ", "),
      f"{float(temp[case].value) / 2**20:.0f}",
    ]
    for mode in _MODES:
      row = temp.get(f"{network}/{mode}")
      ratio = None if row is None else row.ratio
      line.append("" if ratio is None else f"{100 * (1 - ratio):.1f} %")
    lines.append(line)
  return Table(("network, batch", "plain, MiB", *_MODES.values()), lines)


def accuracy_table(rows: Sequence[Row]) -> Table:
  """Returns test accuracy and gradient error with compressed residuals.

  Args:
    rows: of `experiments.residuals.accuracy`.
  """
  errors = {
    (row.experiment, row.case): float(row.value)
    for row in rows
    if row.metric == "gradient_error"
  }
  lines = [
    (
      row.experiment.rpartition("_")[2],
      row.case,
      format_noise(row),
      format_gap(row),
      f"{errors[row.experiment, row.case]:.2g}",
    )
    for row in rows
    if row.metric == "test_accuracy"
  ]
  header = (
    "network",
    "residuals",
    "test accuracy, %",
    "to fp32, points",
    "error of the first gradient",
  )
  return Table(header, lines)
