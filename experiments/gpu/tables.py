"""Table of the jobs of a call."""

from collections import Counter
from collections.abc import Sequence

from experiments.common.records import Row
from experiments.common.tables import Table
from experiments.gpu.jobs import SECONDS


def jobs_table(rows: Sequence[Row]) -> Table:
  """Returns the seconds and the number of rows of each job.

  Args:
    rows: made by `jobs.run_jobs`.
  """
  counts = Counter(row.experiment for row in rows)
  lines = [
    (
      row.case,
      row.value if isinstance(row.value, str) else f"{row.value:.0f}",
      str(counts[f"gpu_{row.case}"]),
    )
    for row in rows
    if row.metric == SECONDS
  ]
  return Table(("job", "seconds", "rows"), lines, text_columns=(0, 1))


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns what plans and transfers measured, a line for each row.

  Args:
    rows: made by `jobs.run_jobs`.
  """
  lines = [
    (row.case, row.metric, _format_value(row.value), row.unit)
    for row in rows
    if row.experiment.startswith(("gpu_plans", "gpu_transfers"))
  ]
  return Table(
    ("case", "metric", "value", "unit"), lines, text_columns=(0, 1, 3)
  )


def _format_value(value: float | str) -> str:
  return value if isinstance(value, str) else f"{value:,.4g}"
