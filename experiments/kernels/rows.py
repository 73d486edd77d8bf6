"""Rows of checked, timed and compiled ops."""

from collections.abc import Iterator, Sequence
from typing import Any

from experiments.common import records
from experiments.kernels import check, compiled, speed

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}


def format_size(size_bytes: int) -> str:
  """Returns a size with a binary unit.

  >>> format_size(1 << 16), format_size(1 << 31)
  ('64KiB', '2GiB')
  """
  unit = next(u for u, n in _UNITS.items() if size_bytes % n == 0)
  return f"{size_bytes // _UNITS[unit]}{unit}"


def make_speed_rows(speeds: Sequence[speed.Speed]) -> Iterator[records.Row]:
  """Yields bandwidth, and fraction and speedup, of each timed case."""
  for s in speeds:
    of_array = f"{s.op}/{format_size(s.size_bytes)}"
    case = f"{of_array}/{s.case}"
    if s.rate is None or s.fraction is None or s.speedup is None:
      yield _make_row(case, "bandwidth", f"not measured: {s.reason}", "GB/s")
      continue
    yield _make_row(case, "bandwidth", s.rate, "GB/s", baseline=s.copy_rate)
    fraction, noise = s.fraction
    yield _make_row(
      case, "bandwidth_fraction", fraction, "of the copy's", noise
    )
    yield _make_row(case, "speedup", s.speedup.value, "x", s.speedup.noise)
    if s.is_default:
      yield _make_row(of_array, "default_implementation", s.case, "")


def make_check_rows(outcomes: Sequence[check.Outcome]) -> Iterator[records.Row]:
  """Yields how many values of each implementation are checked and wrong."""
  for (op, name), found in group_outcomes(outcomes).items():
    checked = sum(o.values for o in found)
    wrong = sum(o.wrong for o in found if o.wrong is not None)
    yield _make_row(f"{op}/{name}", "checked_values", checked, "values")
    yield _make_row(f"{op}/{name}", "wrong_values", wrong, "values")


def group_outcomes(
  outcomes: Sequence[check.Outcome],
) -> dict[tuple[str, str], list[check.Outcome]]:
  """Returns the outcomes of each (op, implementation)."""
  groups: dict[tuple[str, str], list[check.Outcome]] = {}
  for o in outcomes:
    groups.setdefault((o.op, o.implementation), []).append(o)
  return groups


def make_compiled_rows(
  figures: Sequence[tuple[str, str, compiled.Figures | str]], device: str
) -> Iterator[records.Row]:
  """Yields the figures of each (op, implementation), or why there are none."""
  machine = f"{device}: compiled, not run"
  for op, name, found in figures:
    case = f"{op}/{name}"
    if isinstance(found, str):
      yield _make_row(
        case, "launches_compiled", f"none: {found}", "", machine=machine
      )
      continue
    for metric, value, unit in (
      ("launches_compiled", found.launches, "kernels"),
      ("traffic_ratio_compiled", found.traffic_ratio, "ideal bytes"),
      ("registers_compiled", found.registers, "a thread"),
      ("spill_bytes_compiled", found.spill_bytes, "bytes"),
      ("occupancy_compiled", found.occupancy, "of threads"),
      ("loads_compiled", format_widths(found.loads), "instructions x bytes"),
      ("stores_compiled", format_widths(found.stores), "instructions x bytes"),
    ):
      known = "unknown" if value is None else value
      yield _make_row(case, metric, known, unit, machine=machine)


def format_widths(widths: dict[int, int]) -> str:
  """Returns numbers of instructions by width, such as `1x4 2x8`."""
  return " ".join(f"{n}x{width}" for width, n in widths.items())


def _make_row(
  case: str,
  metric: str,
  value: float | str,
  unit: str,
  noise: float | None = None,
  **options: Any,
) -> records.Row:
  figure = records.Measured(value, unit, noise)
  return records.make_row("kernels", case, metric, figure, **options)
