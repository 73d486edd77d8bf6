"""Rows of codec timings: a ratio and the milliseconds behind it."""

from collections.abc import Iterator, Sequence

import jax

from experiments.codecs import run
from experiments.common import records


def make_rows(results: Sequence[run.Result]) -> list[records.Row]:
  """Returns two rows for each result: the ratio, and its times in ms."""
  return [row for result in results for row in _make_pair(result)]


def _make_pair(result: run.Result) -> Iterator[records.Row]:
  stamp = (records.describe_machine(), jax.__version__)
  stem, _, kind = result.metric.rpartition("_")
  unit = "copies" if kind == "copies" else "x"
  yield records.Row(
    "codecs",
    result.case,
    result.metric,
    result.value,
    unit,
    None,
    None,
    result.noise,
    *stamp,
  )
  # Ratios are medians within repeats: the time that follows from the median
  # ratio is less noisy than the median time.
  yield records.Row(
    "codecs",
    result.case,
    f"{stem}_ms",
    result.value * result.baseline,
    "ms",
    result.baseline,
    result.value,
    None,
    *stamp,
  )
