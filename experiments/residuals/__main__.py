"""The networks of Layrub and Layup, in every mode, beside what these printed.

  JAX_PLATFORMS=cpu python -m experiments.residuals \\
    --json=docs/results/residuals.jsonl --plot=docs/results/residuals.png

Compiled and predicted as by `experiments.residuals.one_network`; see there for
what the figures are and are not. Then, for a device of --limit_gb, parameters,
gradients and batch included:
  deepest        bottleneck ResNet, batch 16, 224 pixels, (3, n, 5n, 3) blocks;
  largest_batch  of --batch_of.
Both are sizes whose program was compiled and fits; `device_bytes_drawn` is what
two small programs had said of them. `streamed` is a way of these alone: the
parameters are on the host (`host_temp_bytes`) and come packed in 8 bits, some
blocks at a time. `budget_...` is what `planner.fit_memory` makes of the whole
loss of --budget_of under --budgets. A GPU's time is measured where there is one.
"""

import statistics
from collections.abc import Iterator, Sequence

import jax
from absl import flags
from rich.table import Table

from experiments.common import records, shared_flags
from experiments.common.console import make_console
from experiments.residuals import (
  budgets,
  limits,
  measure,
  paper,
  points,
  report,
)

_EXPERIMENT = "residuals"
_USUAL = (
  "plain",
  "jax_checkpoint",
  "jax_offload",
  "cut",
  "cut_int4",
  "cut_together",
  "cut_int4_together",
  "update_int4_host",
  "everything",
)
_NETWORKS = flags.DEFINE_list(
  "networks",
  list(paper.NETWORKS),
  "Networks and batches, NAME:BATCH.",
  allow_override=True,
)
_MODES = flags.DEFINE_list(
  "modes", list(_USUAL), "Of training.", allow_override=True
)
_LIMIT = flags.DEFINE_float("limit_gb", 12.0, "Of the device, 10^9 bytes.")
_FIT = flags.DEFINE_list(
  "fit",
  ["plain", "jax_checkpoint", "cut_int4", "everything", "streamed"],
  "Modes whose deepest network and largest batch are looked for.",
)
_BATCH_OF = flags.DEFINE_list("batch_of", ["resnet50"], "Networks.")
_BUDGETS = flags.DEFINE_list(
  "budgets",
  ["0.5", "0.25", "0.1", "0.05"],
  "Of what plain training holds, for `planner.fit_memory`.",
)
_BUDGET_OF = flags.DEFINE_list(
  "budget_of", ["gpt:8", "resnet152:32"], "Networks and batches."
)
_TARGET = flags.DEFINE_enum(
  "target",
  "h100",
  list(measure.TARGETS),
  "To compile for.",
  allow_override=True,
)
_JSON = shared_flags.define_rows()
_PLOT = shared_flags.define_plot()


def published() -> Iterator[records.Row]:
  """What the papers printed, as rows."""
  for p in paper.PUBLISHED:
    yield _row(f"paper/{p.case}", p.metric, p.value, p.unit, p.source)


def means(rows: Sequence[records.Row]) -> Iterator[records.Row]:
  """For each mode, what it saves and costs on average over the networks.

  Args:
    rows: of points, with their ratios to `plain`.
  """
  for metric, name in (
    ("temp_bytes", "saved_percent"),
    ("step_ms_predicted", "step_percent_predicted"),
  ):
    ratios: dict[str, list[float]] = {}
    machine = ""
    for row in rows:
      mode = row.case.rpartition("/")[2]
      if row.metric == metric and row.ratio is not None and mode != "plain":
        ratios.setdefault(mode, []).append(row.ratio)
        machine = row.machine
    for mode, found in ratios.items():
      sign = -1 if metric == "temp_bytes" else 1
      changes = [sign * 100 * (ratio - 1) for ratio in found]
      case = f"mean_of_{len(found)}/{mode}"
      yield _row(case, name, statistics.fmean(changes), "%", machine)
      if metric == "temp_bytes":
        yield _row(f"best/{mode}", name, max(changes), "%", machine)


def fits(
  modes: Sequence[str],
  batch_of: Sequence[str],
  target: str,
  limit_gb: float,
  **small: tuple[int, int],
) -> Iterator[records.Row]:
  """The deepest ResNet and the largest batches that fit, as rows.

  Args:
    modes: of training.
    batch_of: networks whose largest batch is looked for.
    target: to compile for.
    limit_gb: of the device, 10^9 bytes.
    **small: as for `footprint._fits`.
  """
  limit = limit_gb * 1e9
  for mode in modes:
    case = f"{limit_gb:g}GB/{mode}"
    found = limits.deepest(mode, target, limit, **small)
    yield from _of_fit(f"resnet_batch16/{case}", "deepest", found, target)
    for name in batch_of:
      spec = points.Spec(name, 1)
      found = limits.largest_batch(spec, mode, target, limit, **small)
      yield from _of_fit(f"{name}/{case}", "largest_batch", found, target)


def _of_fit(
  case: str, metric: str, found: limits.Fit | None, target: str
) -> Iterator[records.Row]:
  unit = "layers" if metric == "deepest" else "examples"
  if found is None:
    yield _row(case, metric, "none fits", unit, target)
    return
  memory = found.memory
  yield _row(case, metric, found.size, unit, memory.machine)
  for name, value in (
    ("device_bytes", memory.device_bytes),
    ("device_bytes_drawn", found.drawn_bytes),
    ("temp_bytes", memory.temp_bytes),
    ("host_temp_bytes", memory.host_temp_bytes),
    ("argument_bytes", memory.argument_bytes),
  ):
    yield _row(f"{case}/{metric}", name, value, "bytes", memory.machine)
  compiled = f"{case}/{metric}"
  yield _row(
    compiled, "compile_s", memory.compile_s, "s", records.describe_machine()
  )


def summary(rows: Sequence[records.Row]) -> Table:
  """Ours beside the papers'."""
  table = Table(title="beside what was printed")
  for name in ("case", "what", "value", "unit", "where"):
    table.add_column(name, overflow="fold")
  for row in rows:
    if row.metric in _SUMMED:
      text = row.value if isinstance(row.value, str) else f"{row.value:.4g}"
      table.add_row(row.case, row.metric, text, row.unit, row.machine)
  return table


_SUMMED = (
  "saved_percent",
  "step_percent",
  "step_percent_predicted",
  "deepest",
  "largest_batch",
  "budget_bytes",
  "device_bytes_predicted",
  "least_bytes",
)


def _row(
  case: str, metric: str, value: float | str, unit: str, machine: str
) -> records.Row:
  return records.Row(
    _EXPERIMENT,
    case,
    metric,
    value,
    unit,
    None,
    None,
    None,
    machine,
    jax.__version__,
  )


def main() -> None:
  """Compiles, predicts, measures; prints tables and writes rows."""
  target, console = _TARGET.value, make_console()
  if why := measure.refusal(target):
    console.print(f"Nothing can be compiled for {target}: {why}.")
    return
  found = points.find_all(
    points.parse(_NETWORKS.value),
    _MODES.value,
    target,
    _EXPERIMENT,
    _JSON.value,
  )
  console.print(report.table(found))
  rows = [*published(), *found, *means(found)]
  for row in fits(_FIT.value, _BATCH_OF.value, target, _LIMIT.value):
    rows.append(row)
    if _JSON.value:
      records.write_rows(_JSON.value, rows)
  for spec in points.parse(_BUDGET_OF.value):
    shares = [float(share) for share in _BUDGETS.value]
    for row in budgets.rows(_EXPERIMENT, spec, shares, target):
      rows.append(row)
      if _JSON.value:
        records.write_rows(_JSON.value, rows)
  console.print(summary(rows))
  if _JSON.value:
    records.write_rows(_JSON.value, rows)
  if _PLOT.value:
    report.save_plot(rows, _PLOT.value)


if __name__ == "__main__":
  shared_flags.run_main(main)
