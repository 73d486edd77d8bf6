"""Rows of what was measured on this device."""

import statistics
from collections.abc import Sequence

import jax

from experiments.common import records


def make_row(
  experiment: str,
  case: str,
  metric: str,
  value: float | str,
  unit: str,
  repeats: Sequence[float] = (),
  baseline: float | None = None,
) -> records.Row:
  """Returns the row of a figure, or of the reason why there is none."""
  ratio = None
  if baseline is not None and not isinstance(value, str):
    ratio = value / baseline
  return records.Row(
    experiment,
    case,
    metric,
    value,
    unit,
    baseline,
    ratio,
    statistics.stdev(repeats) if len(repeats) > 1 else None,
    records.describe_machine(),
    jax.__version__,
  )
