"""Table of compiled updates: memory and traffic of each case."""

from collections.abc import Sequence

from experiments.common import records, tables


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the MiB of every case and metric, with ratios to baselines."""
  lines = [
    (
      row.case,
      row.metric,
      f"{float(row.value) / 2**20:.1f}",
      "" if row.ratio is None else f"{row.ratio:.3f}",
    )
    for row in rows
  ]
  return tables.Table(
    ("case", "metric", "MiB", "ratio"),
    lines,
    title=rows[0].machine,
    text_columns=(0, 1),
  )
