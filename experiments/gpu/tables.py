"""Table of the jobs of a call."""

from collections import Counter
from collections.abc import Sequence

from experiments.common import records, tables
from experiments.gpu import jobs


def jobs_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the seconds and the number of rows of each job."""
  counts = Counter(row.experiment for row in rows)
  lines = [
    (
      row.case,
      row.value if isinstance(row.value, str) else f"{row.value:.0f}",
      str(counts[f"gpu_{row.case}"]),
    )
    for row in rows
    if row.metric == jobs.SECONDS
  ]
  return tables.Table(("job", "seconds", "rows"), lines, text_columns=(0, 1))


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns what plans and transfers measured, a line for each row."""
  lines = [
    (row.case, row.metric, _format_value(row.value), row.unit)
    for row in rows
    if row.experiment.startswith(("gpu_plans", "gpu_transfers"))
  ]
  return tables.Table(
    ("case", "metric", "value", "unit"), lines, text_columns=(0, 1, 3)
  )


def _format_value(value: float | str) -> str:
  return value if isinstance(value, str) else f"{value:,.4g}"
