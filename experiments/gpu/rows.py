"""Rows of what was measured on this device."""

import statistics
from collections.abc import Sequence

import jax

from experiments.common import records
from experiments.common.records import Row


def make_row(
  experiment: str,
  case: str,
  metric: str,
  value: float | str,
  unit: str,
  repeats: Sequence[float] = (),
  baseline: float | None = None,
) -> Row:
  """Returns the row of a figure, or of the reason why there is none.

  Args:
    experiment: name of the experiment.
    case: what was measured.
    metric: name of the quantity.
    value: the figure, or text.
    unit: unit of the value, of its repeats and of the baseline.
    repeats: figures of all repeats, whose deviation is the noise.
    baseline: the same figure of the baseline, if there is one.
  """
  ratio = None
  if baseline is not None and not isinstance(value, str):
    ratio = value / baseline
  return Row(
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
