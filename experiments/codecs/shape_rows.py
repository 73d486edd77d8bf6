"""Rows of timed shapes: nanoseconds per value and worker."""

from collections.abc import Sequence

import jax

from experiments.codecs.shape_run import Result
from experiments.codecs.shape_tables import EXPERIMENT
from experiments.common import records
from experiments.common.kept import describe_sources
from experiments.common.records import Row


def make_rows(results: Sequence[Result]) -> list[Row]:
  """Returns a row for each result; its baseline is the friendly shape.

  Ratios are medians within repeats: the time that follows from the median ratio
  is less noisy than the median time.

  Args:
    results: made by `measure_shapes`.
  """
  return [
    Row(
      EXPERIMENT,
      result.case,
      f"{result.metric}_ns",
      result.value * result.baseline,
      "ns",
      result.baseline,
      result.value,
      result.noise * result.baseline,
      _describe_stamp(),
      jax.__version__,
    )
    for result in results
  ]


def is_current(row: Row) -> bool:
  """Says whether a row is of this machine, these sources and this JAX.

  Args:
    row: made by `make_rows`.
  """
  return (row.machine, row.jax) == (_describe_stamp(), jax.__version__)


def _describe_stamp() -> str:
  sources = describe_sources(("experiments/codecs", "jaxmotion"))
  return f"{records.describe_machine()}; {sources}"
