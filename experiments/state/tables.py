"""Table of compiled updates: memory and traffic of each case."""

from collections.abc import Sequence

from experiments.common.records import Row
from experiments.common.tables import Table


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns the MiB of every case and metric, with ratios to baselines.

  Args:
    rows: made by `rows.make_rows`.
  """
  lines = [
    (
      row.case,
      row.metric,
      f"{float(row.value) / 2**20:.1f}",
      "" if row.ratio is None else f"{row.ratio:.3f}",
    )
    for row in rows
  ]
  return Table(
    ("case", "metric", "MiB", "ratio"),
    lines,
    title=rows[0].machine,
    text_columns=(0, 1),
  )
