"""Table of codec timings, a line for each codec."""

import re
from collections.abc import Sequence

from experiments.codecs import shape_tables
from experiments.common import records, tables

_HEADINGS = {
  "encode_copies": "encode, copies",
  "update_ratio": "decode + mean + update",
  "vector_ratio": "the same, a vector",
}
_LEAVES = re.compile(r"leaves(\d+)_ratio")


def summary_table(
  rows: Sequence[records.Row], *, show_noise: bool = False
) -> tables.Table:
  """Returns the ratios, a line for each codec and a column for each metric."""
  if rows[0].experiment == shape_tables.EXPERIMENT:
    return shape_tables.summary_table(rows)
  found = tables.index_rows(rows)
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
      line.append("" if row is None else tables.format_noise(row))
    lines.append(line)
  return tables.Table(
    ("codec", *metrics.values()),
    lines,
    title=f"{rows[0].machine}, JAX {rows[0].jax}",
    caption="medians of ratios, ± sample standard deviation",
  )


def _find_heading(metric: str) -> str | None:
  if leaves := _LEAVES.fullmatch(metric):
    return f"{leaves[1]} leaves"
  return _HEADINGS.get(metric)
