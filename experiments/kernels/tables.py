"""Tables of checked, timed and compiled ops."""

from collections.abc import Sequence

import jax

from experiments.common import records, tables
from experiments.kernels import check
from experiments.kernels.rows import group_outcomes

# An op that takes more than twice the time of its traffic is marked.
_SLOW = 2.0
_COMPILED = {
  "launches_compiled": ("kernels", "d"),
  "traffic_ratio_compiled": ("traffic", ".2f"),
  "spill_bytes_compiled": ("spilled", "d"),
  "registers_compiled": ("registers", "d"),
  "occupancy_compiled": ("occupancy", ".2f"),
  "loads_compiled": ("loads", ""),
  "stores_compiled": ("stores", ""),
}


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the figures of compiled rows, else the speeds of timed rows."""
  if any(row.metric == "launches_compiled" for row in rows):
    return compiled_table(rows)
  return speed_table(rows)


def speed_table(
  rows: Sequence[records.Row], size: str | None = None
) -> tables.Table:
  """Returns the speeds of ops and peers, a line for each."""
  found = tables.index_rows(rows)
  lines = []
  for row in [row for row in rows if row.metric == "bandwidth"]:
    op, of_array, name = row.case.split("/")
    if size in (None, of_array):
      default = found.get((f"{op}/{of_array}", "default_implementation"))
      is_default = default is not None and default.value == name
      lines.append(
        (
          op if size else f"{op}, {of_array}",
          name + "*" * is_default,
          *_speed_cells(found, row),
        )
      )
  return tables.Table(
    ("op", "by", "GB/s", "of copy", "floor ratio", "speedup"),
    lines,
    title=f"{size or 'all sizes'}: {rows[0].machine}, JAX {rows[0].jax}",
    caption="* what the op chooses; ! beyond twice the time of its traffic",
    text_columns=(0, 1),
  )


def _speed_cells(
  found: dict[tuple[str, str], records.Row], row: records.Row
) -> tuple[str, str, str, str]:
  if isinstance(row.value, str):
    return "not measured", row.value.removeprefix("not measured: "), "", ""
  fraction = found[row.case, "bandwidth_fraction"]
  floor = 1 / float(fraction.value)
  return (
    f"{row.value:.1f}",
    tables.format_noise(fraction),
    f"{floor:.2f}" + (" !" if floor > _SLOW else ""),
    tables.format_noise(found[row.case, "speedup"]),
  )


def check_table(outcomes: Sequence[check.Outcome], seed: int) -> tables.Table:
  """Returns checked and wrong values, a line for each implementation."""
  lines = []
  for (op, name), found in group_outcomes(outcomes).items():
    taken = [o for o in found if o.wrong is not None]
    wrong = sum(o.wrong or 0 for o in taken)
    bad = [o.case for o in taken if o.wrong]
    reasons = {o.reason for o in found if o.reason}
    lines.append(
      (
        op,
        name,
        f"{len(taken)} of {len(found)}",
        f"{sum(o.values for o in taken):,}",
        f"{wrong:,}",
        "; ".join([*bad, *sorted(reasons)]),
      )
    )
  return tables.Table(
    ("op", "by", "arrays", "values", "wrong", "notes"),
    lines,
    title=f"{records.describe_machine()}, JAX {jax.__version__}, seed {seed}",
    text_columns=(0, 1, 5),
  )


def compiled_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the figures of compiled ops, a line for each implementation."""
  found = tables.index_rows(rows)
  lines = []
  for row in [row for row in rows if row.metric == "launches_compiled"]:
    op, name = row.case.split("/")
    if isinstance(row.value, str) and row.value.startswith("none: "):
      reason = row.value.removeprefix("none: ")
      lines.append((op, name, "none", *[""] * 4, reason, ""))
      continue
    cells = [
      _format_figure(found[row.case, metric].value, style)
      for metric, (_, style) in _COMPILED.items()
    ]
    lines.append((op, name, *cells))
  return tables.Table(
    ("op", "by", *(heading for heading, _ in _COMPILED.values())),
    lines,
    title=f"{rows[0].machine}, by XLA of JAX {rows[0].jax}",
    caption="registers, occupancy, loads and stores (instructions x bytes for"
    " a thread): of the kernel that moves most",
    text_columns=(0, 1, 7, 8),
  )


def _format_figure(value: float | str, style: str) -> str:
  if value == "unknown":
    return "?"
  return str(value) if isinstance(value, str) else format(value, style)
