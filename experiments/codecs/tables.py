"""Tables of codec timings, and of timed shapes beside the friendly one."""

import re
from collections.abc import Sequence

from experiments.codecs import shape_cases
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
  if rows[0].experiment == EXPERIMENT:
    return shape_table(rows)
  if rows[0].experiment == PROGRAMS:
    return programs_table(rows)
  if rows[0].experiment == LAUNCHES:
    return launches_table(rows)
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


EXPERIMENT = "codecs_shapes"
"""Name of the experiment in rows."""


def shape_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the ratios of each shape: exchanges, and the slowest passes."""
  ratios = {key: row.ratio for key, row in tables.index_rows(rows).items()}
  names, codecs = (
    list(dict.fromkeys(row.case.split("/")[i] for row in rows)) for i in (0, 1)
  )
  joining = [codec for codec in codecs if shape_cases.CODECS[codec].is_tree]
  alone = [codec for codec in codecs if codec not in joining]
  encoding = [codec for codec in alone if codec != shape_cases.PLAIN]
  columns = {f"exchange, {codec}": ("exchange_ns", [codec]) for codec in alone}
  if joining:
    columns["slowest exchange in buckets"] = ("exchange_ns", joining)
  columns["slowest encode"] = ("encode_ns", encoding)
  columns["slowest update"] = ("update_ns", encoding)
  columns[f"update, {shape_cases.PLAIN}"] = ("update_ns", [shape_cases.PLAIN])
  lines = []
  for name in names:
    line = [f"`{name}`"]
    for metric, members in columns.values():
      found = [ratios.get((f"{name}/{codec}", metric)) for codec in members]
      known = [ratio for ratio in found if ratio is not None]
      line.append(f"{max(known):.2f}" if known else "")
    lines.append(line)
  header = ("shape", *columns)
  # Passes that the rows have of no shape.
  filled = [i for i in range(len(header)) if any(line[i] for line in lines)]
  return tables.Table(
    [header[i] for i in filled],
    [[line[i] for i in filled] for line in lines],
    title=f"{rows[0].machine}, JAX {rows[0].jax}",
    caption="time per value and worker, over that of the friendly matrix",
  )


PROGRAMS = "codecs_programs"
"""Name of the experiment of steps with many arrays."""

LAUNCHES = "codecs_launches"
"""Name of the experiment of steps compiled for GPUs that are not there."""

PROGRAM_UNITS = {
  "program_s": (PROGRAMS, "s"),
  "kernels": (PROGRAMS, "operations"),
  "copies": (PROGRAMS, "operations"),
  "step_ms": (PROGRAMS, "ms"),
  "temp_mb": (PROGRAMS, "MB"),
  "launches": (LAUNCHES, "kernels"),
}
"""Metrics of a step, their experiment and their unit."""


def programs_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns ratios to plain JAX, and what an exchange adds."""
  found = tables.index_rows(rows)
  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    of = [
      found[case, metric]
      for metric, (experiment, _) in PROGRAM_UNITS.items()
      if experiment == PROGRAMS
    ]
    values = [float(row.value) for row in of]
    plain = [float(row.baseline or 0) for row in of]
    seconds, kernels, copies, step, temporaries = zip(
      values, plain, strict=True
    )
    lines.append(
      (
        *case.split("/"),
        f"{seconds[0]:.1f}",
        f"{seconds[0] / seconds[1]:.2f}",
        f"{kernels[0] - kernels[1]:.0f}",
        f"{copies[0] - copies[1]:.0f}",
        f"{step[0] / step[1]:.2f}",
        f"{temporaries[0]:.0f}",
      )
    )
  names = ("compile, s", "x plain", "kernels added", "copies added")
  heads = ("model", "codec", *names, "step, x plain", "temporaries, MB")
  return tables.Table(heads, lines, text_columns=(0, 1))


def launches_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the launches of each step, and those that an exchange adds."""
  lines = []
  for row in rows:
    launches, plain = float(row.value), float(row.baseline or 0)
    cells = f"{launches:.0f}", f"{launches - plain:.0f}"
    lines.append((*row.case.split("/"), *cells))
  heads = "model", "codec", "launches", "added"
  return tables.Table(heads, lines, text_columns=(0, 1))
