"""Rows and tables of what `experiments.kernels` found."""

from collections.abc import Iterator, Sequence

import jax
import rich.table

from experiments.common import records
from experiments.kernels.check import Outcome
from experiments.kernels.compiled import Figures
from experiments.kernels.speed import Speed

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
# Twice the time of the traffic alone is marked.
_SLOW = 2.0


def size_name(size_bytes: int) -> str:
  """Spells a size.

  >>> size_name(1 << 16), size_name(1 << 31)
  ('64KiB', '2GiB')
  """
  unit = next(u for u, n in _UNITS.items() if size_bytes % n == 0)
  return f"{size_bytes // _UNITS[unit]}{unit}"


def speed_rows(speeds: Sequence[Speed]) -> Iterator[records.Row]:
  """Rows for each speed: against the copy, and against the reference."""
  for s in speeds:
    case = f"{s.op}/{size_name(s.size_bytes)}/{s.case}"
    if s.rate is None or s.fraction is None or s.speedup is None:
      value = f"not measured: {s.reason}"
      yield _row(case, "bandwidth_fraction", value, "GB/s")
      continue
    yield _row(
      case, "bandwidth_fraction", s.rate, "GB/s", s.copy_rate, *s.fraction
    )
    baseline = s.rate / s.speedup.value
    yield _row(case, "speedup", s.rate, "GB/s", baseline, *s.speedup)
    if s.is_default:
      case = f"{s.op}/{size_name(s.size_bytes)}"
      yield _row(case, "default_implementation", s.case, "")


def speed_table(speeds: Sequence[Speed], size_bytes: int) -> rich.table.Table:
  """What was measured on arrays of one size."""
  table = rich.table.Table(
    title=(
      f"{size_name(size_bytes)}: {records.machine()}, JAX {jax.__version__}"
    ),
    caption="* what the op chooses; ! beyond twice the time of its traffic",
  )
  table.add_column("op", overflow="fold")
  table.add_column("by")
  for name in ("GB/s", "of copy", "floor ratio", "speedup"):
    table.add_column(name, justify="right")
  for s in speeds:
    if s.size_bytes == size_bytes:
      table.add_row(s.op, s.case + "*" * s.is_default, *_cells(s))
  return table


def _cells(s: Speed) -> tuple[str, ...]:
  if s.rate is None or s.fraction is None or s.speedup is None:
    return "not measured", s.reason
  floor = 1 / s.fraction.value
  return (
    f"{s.rate:.1f}",
    f"{s.fraction.value:.2f} ± {s.fraction.noise:.2f}",
    f"{floor:.2f}" + (" !" if floor > _SLOW else ""),
    f"{s.speedup.value:.2f} ± {s.speedup.noise:.2f}",
  )


def check_rows(outcomes: Sequence[Outcome]) -> Iterator[records.Row]:
  """A row for each implementation of each op: values that were wrong."""
  for (op, name), found in _by_implementation(outcomes).items():
    wrong = sum(o.wrong for o in found if o.wrong is not None)
    values = sum(o.values for o in found)
    yield _row(f"{op}/{name}", "wrong_values", wrong, "values", values)


def check_table(outcomes: Sequence[Outcome], seed: int) -> rich.table.Table:
  """A line for each implementation of each op."""
  table = rich.table.Table(
    title=f"{records.machine()}, JAX {jax.__version__}, seed {seed}"
  )
  table.add_column("op", overflow="fold")
  table.add_column("by")
  for name in ("arrays", "values", "wrong"):
    table.add_column(name, justify="right")
  table.add_column("notes")
  for (op, name), found in _by_implementation(outcomes).items():
    taken = [o for o in found if o.wrong is not None]
    wrong = sum(o.wrong or 0 for o in taken)
    bad = [o.case for o in taken if o.wrong]
    reasons = {o.reason for o in found if o.reason}
    table.add_row(
      op,
      name,
      f"{len(taken)} of {len(found)}",
      f"{sum(o.values for o in taken):,}",
      f"{wrong:,}",
      "; ".join([*bad, *sorted(reasons)]),
    )
  return table


def _by_implementation(
  outcomes: Sequence[Outcome],
) -> dict[tuple[str, str], list[Outcome]]:
  groups: dict[tuple[str, str], list[Outcome]] = {}
  for o in outcomes:
    groups.setdefault((o.op, o.implementation), []).append(o)
  return groups


def compiled_rows(
  figures: Sequence[tuple[str, str, Figures | str]], gpu: str
) -> Iterator[records.Row]:
  """Rows of figures of (op, implementation), or of why there are none."""
  machine = f"{gpu}: compiled, not run"
  for op, name, found in figures:
    case = f"{op}/{name}"
    if isinstance(found, str):
      yield _row(
        case, "launches_compiled", f"none: {found}", "", machine=machine
      )
      continue
    for metric, value, unit in (
      ("launches_compiled", found.launches, "kernels"),
      ("traffic_ratio_compiled", found.traffic_ratio, "ideal bytes"),
      ("registers_compiled", found.registers, "a thread"),
      ("spill_bytes_compiled", found.spill_bytes, "bytes"),
      ("occupancy_compiled", found.occupancy, "of threads"),
      ("load_bytes_compiled", _widths(found.loads), "instructions x bytes"),
      ("store_bytes_compiled", _widths(found.stores), "instructions x bytes"),
    ):
      known = "unknown" if value is None else value
      yield _row(case, metric, known, unit, machine=machine)


def compiled_table(
  figures: Sequence[tuple[str, str, Figures | str]], gpu: str
) -> rich.table.Table:
  """A line for each implementation of each op."""
  table = rich.table.Table(
    title=f"{gpu}: compiled, not run, by XLA of JAX {jax.__version__}",
    caption=(
      "registers, occupancy, loads and stores (instructions x bytes for a "
      "thread): of the kernel that moves most"
    ),
  )
  table.add_column("op", overflow="fold")
  table.add_column("by")
  for name in ("kernels", "traffic", "spilled", "registers", "occupancy"):
    table.add_column(name, justify="right")
  table.add_column("loads")
  table.add_column("stores")
  for op, name, found in figures:
    if isinstance(found, str):
      table.add_row(op, name, "none", *[""] * 4, found)
      continue
    table.add_row(
      op,
      name,
      _text(found.launches, "d"),
      _text(found.traffic_ratio, ".2f"),
      _text(found.spill_bytes, "d"),
      _text(found.registers, "d"),
      _text(found.occupancy, ".2f"),
      _widths(found.loads),
      _widths(found.stores),
    )
  return table


def _text(value: float | None, form: str) -> str:
  return "?" if value is None else format(value, form)


def _widths(widths: dict[int, int]) -> str:
  return " ".join(f"{n}x{width}" for width, n in widths.items())


def _row(
  case: str,
  metric: str,
  value: float | str,
  unit: str,
  baseline: float | None = None,
  ratio: float | None = None,
  noise: float | None = None,
  *,
  machine: str | None = None,
) -> records.Row:
  return records.Row(
    "bench_kernels",
    case,
    metric,
    value,
    unit,
    baseline,
    ratio,
    noise,
    machine or records.machine(),
    jax.__version__,
  )
