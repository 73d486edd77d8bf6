"""Rows that were measured before, and what they hold for."""

from collections.abc import Container, Iterable

from experiments.common import records

MODELS: tuple[str, ...] = ("experiments/models",)
"""Sources that compiled figures of stock policies depend on."""

COSTS: tuple[str, ...] = (*MODELS, "jaxmotion/perfmodel", "jaxmotion/program")
"""Sources that predicted figures of stock policies depend on."""

OURS: tuple[str, ...] = (*MODELS, "jaxmotion")
"""Sources that figures of ours depend on."""


def add_ratios(
  rows: Iterable[records.Row], metrics: Container[str] | None = None
) -> list[records.Row]:
  """Returns rows with baselines and ratios to plain training."""
  rows = list(rows)
  plain = {
    (row.case.rpartition("/")[0], row.metric): row.value
    for row in rows
    if row.case.endswith("/plain") and not isinstance(row.value, str)
  }

  def add_ratio(row: records.Row) -> records.Row:
    baseline = plain.get((row.case.rpartition("/")[0], row.metric))
    if metrics is not None and row.metric not in metrics:
      baseline = None
    if isinstance(row.value, str) or not baseline:
      return row._replace(baseline=None, ratio=None)
    return row._replace(baseline=baseline, ratio=row.value / baseline)

  return [add_ratio(row) for row in rows]
