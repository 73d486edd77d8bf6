"""Table of timed shapes: a line for each, ratios to the friendly shape."""

from collections.abc import Sequence

from experiments.codecs.shape_cases import CODECS, PLAIN
from experiments.common.records import Row
from experiments.common.tables import Table, index_rows

EXPERIMENT = "codecs_shapes"
"""Name of the experiment in rows."""


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns the ratios of each shape: exchanges, and the slowest passes.

  Args:
    rows: made by `shape_rows.make_rows`.
  """
  ratios = {key: row.ratio for key, row in index_rows(rows).items()}
  names, codecs = (
    list(dict.fromkeys(row.case.split("/")[i] for row in rows)) for i in (0, 1)
  )
  joining = [codec for codec in codecs if CODECS[codec].is_tree]
  alone = [codec for codec in codecs if codec not in joining]
  encoding = [codec for codec in alone if codec != PLAIN]
  columns = {f"exchange, {codec}": ("exchange_ns", [codec]) for codec in alone}
  if joining:
    columns["slowest exchange in buckets"] = ("exchange_ns", joining)
  columns["slowest encode"] = ("encode_ns", encoding)
  columns["slowest update"] = ("update_ns", encoding)
  columns[f"update, {PLAIN}"] = ("update_ns", [PLAIN])
  lines = []
  for name in names:
    line = [f"`{name}`"]
    for metric, members in columns.values():
      found = [ratios.get((f"{name}/{codec}", metric)) for codec in members]
      known = [ratio for ratio in found if ratio is not None]
      line.append(f"{max(known):.2f}" if known else "")
    lines.append(line)
  return Table(
    ("shape", *columns),
    lines,
    title=f"{rows[0].machine}, JAX {rows[0].jax}",
    caption="time per value and worker, over that of the friendly matrix",
  )
