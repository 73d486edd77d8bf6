"""Rows of timed shapes: nanoseconds per value and worker."""

from collections.abc import Sequence

import jax

from experiments.codecs import shape_run, shape_tables
from experiments.common import kept, records


def make_rows(results: Sequence[shape_run.Result]) -> list[records.Row]:
  """Returns a row for each result; its baseline is the friendly shape."""
  # Ratios are medians within repeats: the time that follows from the median
  # ratio is less noisy than the median time.
  return [
    records.Row(
      shape_tables.EXPERIMENT,
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


def is_current(row: records.Row) -> bool:
  """Says whether a row is of this machine, these sources and this JAX."""
  return (row.machine, row.jax) == (_describe_stamp(), jax.__version__)


def _describe_stamp() -> str:
  sources = kept.describe_sources(("experiments/codecs", "jaxmotion"))
  return f"{records.describe_machine()}; {sources}"
