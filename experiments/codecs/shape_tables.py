"""Table of timed shapes: a line for each shape, ratios to the friendly one."""

from collections.abc import Sequence

from experiments.common.records import Row
from experiments.common.tables import Table, index_rows

EXPERIMENT = "codecs_shapes"
"""Name of the experiment in rows."""


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns the ratios of each shape, codecs in one cell for each metric.

  Args:
    rows: made by `shape_rows.make_rows`.
  """
  found = index_rows(rows)
  names, codecs = (
    list(dict.fromkeys(row.case.split("/")[i] for row in rows)) for i in (0, 1)
  )
  metrics = dict.fromkeys(row.metric for row in rows)
  columns = [(metric, codec) for metric in metrics for codec in codecs]
  lines = []
  for name in names:
    line = [f"`{name}`"]
    for metric, codec in columns:
      row = found.get((f"{name}/{codec}", metric))
      ratio = None if row is None else row.ratio
      line.append("" if ratio is None else f"{ratio:.2f}")
    lines.append(line)
  headings = [
    f"{metric.removesuffix('_ns')} {codec}" for metric, codec in columns
  ]
  return Table(
    ("shape", *headings),
    lines,
    title=f"{rows[0].machine}, JAX {rows[0].jax}",
    caption="time per value and worker, over that of the friendly matrix",
  )
