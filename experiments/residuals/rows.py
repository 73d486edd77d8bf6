"""Rows of residual memory, fitting sizes and budgets."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

import jax

from experiments.common import records
from experiments.common.records import describe_sources, drop_sources
from experiments.residuals import limits, measure, networks

EXPERIMENT = "residuals"

# Metrics that rows compare with those of `plain`.
_COMPARED = (
  *("temp_bytes", "device_bytes", "peak_bytes_in_use", "flops", "step_ms"),
  *("traffic_bytes_predicted", "step_ms_predicted"),
)

_OF_HOST = (
  *("step_ms", "peak_bytes_in_use", "compile_s"),
  *("gradient_error", "gradient_from_plain", "values_equal"),
  "gradient_error_float64",
)


def make_point_rows(point: measure.Point, target: str) -> Iterator[records.Row]:
  """Yields the rows of a point; ratios are added by `add_plain_ratios`."""
  case = f"{point.spec.case}/{point.mode}"
  for metric, value in _list_figures(point):
    machine = _machine_of(metric, point, target)
    yield _make_row(case, metric, value, _unit_of(metric), machine)


def add_plain_ratios(rows: Iterable[records.Row]) -> list[records.Row]:
  """Returns rows of points with the figures of the network's `plain`."""
  return measure.add_ratios(rows, _COMPARED)


def is_of_point(rows: Sequence[records.Row]) -> bool:
  """Says whether the rows of one case are those of a point."""
  metrics = {row.metric for row in rows}
  return "temp_bytes" in metrics and rows[0].case.count("/") == 1


def is_summary(rows: Sequence[records.Row]) -> bool:
  """Says whether the rows of one case are of papers or means of others."""
  return rows[0].case.startswith(("paper/", "mean_of_", "best/"))


def stamp_rows(
  rows: Iterable[records.Row], mode: str | None
) -> list[records.Row]:
  """Returns rows that say which sources they were measured from."""
  stamp = _describe_stamp(mode)
  return [
    row._replace(machine=f"{drop_sources(row.machine)}; {stamp}")
    for row in rows
  ]


def are_current(rows: Sequence[records.Row], mode: str | None) -> bool:
  """Says whether rows hold still, on this machine and of these sources."""
  stamp, host = _describe_stamp(mode), records.describe_machine()
  return bool(rows) and all(
    row.jax == jax.__version__
    and row.machine.endswith(f"; {stamp}")
    and (row.metric not in _OF_HOST or row.machine == f"{host}; {stamp}")
    for row in rows
  )


def _describe_stamp(mode: str | None) -> str:
  is_stock = mode == "plain" or (mode or "").startswith("jax_")
  return describe_sources(measure.COSTS if is_stock else measure.OURS)


def _list_figures(point: measure.Point) -> Iterator[tuple[str, float | str]]:
  """Yields (metric, value) of a point; a missing value is its reason."""
  memory, prediction = point.memory, point.prediction
  if isinstance(memory, str) or prediction is None:
    yield "temp_bytes", f"none: {memory}"
    return
  for part in ("temp", "host_temp", "argument", "result", "device"):
    yield f"{part}_bytes", getattr(memory, f"{part}_bytes")
  yield "compile_s", memory.compile_s
  yield "flops", prediction.flops
  yield "traffic_bytes_predicted", prediction.bytes
  yield "step_ms_predicted", 1e3 * prediction.step_s
  measured = point.measured
  if measured is None or measured.reason:
    why = measured.reason if measured else "no GPU"
    yield "peak_bytes_in_use", f"not measured: {why}"
    yield "step_ms", f"not measured: {why}"
    return
  peak = measured.peak_bytes
  yield "peak_bytes_in_use", "not measured" if peak is None else peak
  yield "step_ms", measured.step_ms


def _unit_of(metric: str) -> str:
  if "bytes" in metric:
    return "bytes"
  return {"compile_s": "s", "flops": "FLOP"}.get(metric, "ms")


def _machine_of(metric: str, point: measure.Point, target: str) -> str:
  if metric in _OF_HOST:
    return records.describe_machine()
  if metric in ("flops", "traffic_bytes_predicted", "step_ms_predicted"):
    return f"{measure.TARGETS[target]}: predicted from datasheets"
  return point.memory.machine if not isinstance(point.memory, str) else target


def make_paper_rows() -> Iterator[records.Row]:
  """Yields the figures that the papers published."""
  for case, metric, value, unit, source in networks.PUBLISHED:
    yield _make_row(f"paper/{case}", metric, value, unit, source)


def make_mean_rows(rows: Iterable[records.Row]) -> Iterator[records.Row]:
  """Yields the mean savings and costs of each mode over the networks."""
  for metric, name, sign in (
    ("temp_bytes", "saved_percent", -1),
    ("step_ms_predicted", "step_percent_predicted", 1),
  ):
    ratios: dict[str, list[float]] = {}
    machine = ""
    for row in rows:
      mode = row.case.rpartition("/")[2]
      if row.metric == metric and row.ratio is not None and mode != "plain":
        ratios.setdefault(mode, []).append(row.ratio)
        machine = drop_sources(row.machine)
    for mode, found in ratios.items():
      changes = [sign * 100 * (ratio - 1) for ratio in found]
      mean = statistics.fmean(changes)
      yield _make_row(f"mean_of_{len(found)}/{mode}", name, mean, "%", machine)
      if metric == "temp_bytes":
        yield _make_row(f"best/{mode}", name, max(changes), "%", machine)


def make_fit_rows(
  case: str, metric: str, found: limits.FittingSize | None, target: str
) -> Iterator[records.Row]:
  """Yields the rows of the largest size that fits a device."""
  unit = "layers" if metric == "deepest" else "examples"
  if found is None:
    yield _make_row(case, metric, "none fits", unit, target)
    return
  memory = found.memory
  yield _make_row(case, metric, found.size, unit, memory.machine)
  compiled = f"{case}/{metric}"
  for name, value in (
    ("device_bytes", memory.device_bytes),
    ("device_bytes_drawn", found.drawn_bytes),
    ("temp_bytes", memory.temp_bytes),
    ("host_temp_bytes", memory.host_temp_bytes),
    ("argument_bytes", memory.argument_bytes),
  ):
    yield _make_row(compiled, name, value, "bytes", memory.machine)
  host = records.describe_machine()
  yield _make_row(compiled, "compile_s", memory.compile_s, "s", host)


def name_budget(spec: networks.NetworkSpec, share: float) -> str:
  """Returns the case of a network under a memory budget."""
  return f"{spec.case}/budget_{100 * share:g}%"


def make_budget_rows(found: limits.BudgetPlan) -> Iterator[records.Row]:
  """Yields the rows of the plan for a memory budget."""
  case = name_budget(found.spec, found.share)
  machine = f"{found.plain_memory.machine}; predicted from datasheets"
  whole = found.plain_memory.device_bytes

  def make(
    metric: str, value: float, unit: str, baseline: float | None = None
  ) -> records.Row:
    return _make_row(case, metric, value, unit, machine, baseline)

  yield make("budget_bytes", found.budget_bytes, "bytes", whole)
  plan = found.plan
  if plan is None:
    assert found.least_bytes is not None
    yield make("least_bytes", found.least_bytes, "bytes", whole)
    return
  compiled = float(plan.compiled_bytes or 0)
  yield make("device_bytes", compiled, "bytes", whole)
  yield make("device_bytes_predicted", plan.predicted_bytes, "bytes", compiled)
  yield make("step_ms_predicted", 1e3 * plan.step_s, "ms", 1e3 * found.plain_s)
  for action in ("keep", "compress", "offload", "recompute"):
    count = sum(row.action == action for row in plan.rows)
    yield make(f"{action}_residuals", count, "residuals")


def _make_row(
  case: str,
  metric: str,
  value: float | str,
  unit: str,
  machine: str,
  baseline: float | None = None,
) -> records.Row:
  measured = records.Measured(value, unit)
  key = (EXPERIMENT, case, metric)
  return records.make_row(*key, measured, baseline, machine=machine)
