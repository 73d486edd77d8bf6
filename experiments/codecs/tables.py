"""Table of codec timings, a line for each codec."""

import re
from collections.abc import Sequence

from experiments.codecs import shape_tables
from experiments.common.records import Row
from experiments.common.tables import Table, format_noise, index_rows

_HEADINGS = {
  "encode_copies": "encode, copies",
  "update_ratio": "decode + mean + update",
  "vector_ratio": "the same, a vector",
}
_LEAVES = re.compile(r"leaves(\d+)_ratio")


def summary_table(rows: Sequence[Row], *, show_noise: bool = False) -> Table:
  """Returns the ratios, a line for each codec and a column for each metric.

  Args:
    rows: made by `rows.make_rows`, or by `shape_rows.make_rows`.
    show_noise: whether to show the standard deviation of each ratio.
  """
  if rows[0].experiment == shape_tables.EXPERIMENT:
    return shape_tables.summary_table(rows)
  found = index_rows(rows)
  metrics = {
    metric: heading
    for metric in dict.fromkeys(row.metric for row in rows)
    if (heading := _find_heading(metric))
  }
  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    line = [case]
    for metric in metrics:
      row = found.get((case, metric))
      if row is not None and not show_noise:
        row = row._replace(noise=None)
      line.append("" if row is None else format_noise(row))
    lines.append(line)
  return Table(
    ("codec", *metrics.values()),
    lines,
    title=f"{rows[0].machine}, JAX {rows[0].jax}",
    caption="medians of ratios, ± sample standard deviation",
  )


def _find_heading(metric: str) -> str | None:
  if leaves := _LEAVES.fullmatch(metric):
    return f"{leaves[1]} leaves"
  return _HEADINGS.get(metric)
