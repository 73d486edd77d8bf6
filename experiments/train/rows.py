"""Rows of finished training runs, and their table."""

import statistics
from collections.abc import Iterable, Sequence

import jax
from ml_collections import ConfigDict

from experiments.common import records, tables
from experiments.common.records import Measured, Row
from experiments.common.tables import Table
from experiments.common.workdir import Run
from experiments.train.tasks import Task

LINK_SPEEDS = {"100mbit": 1e8, "1gbit": 1e9, "10gbit": 1e10}
"""Bits per second of the links that exchange times are computed for."""

_BASELINE = "fp32"
_COMPUTED = "ms (computed from bytes)"


def make_rows(config: ConfigDict, task: Task, runs: Iterable[Run]) -> list[Row]:
  """Returns one row for each exchange and metric, over the seeds."""
  groups: dict[str, list[Run]] = {}
  for run in runs:
    groups.setdefault(run.exchange, []).append(run)
  # The workers of one process share its link.
  sharing = config.workers // count if (count := jax.process_count()) > 1 else 1
  cases = {
    name: _measure_exchange(task, group, sharing)
    for name, group in groups.items()
  }
  base = dict(cases.get(_BASELINE, {}))
  if base:
    sent = {name: group[0].wire_bytes for name, group in groups.items()}
    for name, found in cases.items():
      ratio = sent[_BASELINE] / sent[name]
      found["wire_ratio"] = Measured(ratio, "x")
  cases["data"] = {m: Measured(v, unit) for m, v, unit in task.facts}
  return records.make_rows(f"train_{config.experiment}", cases, base)


def _measure_exchange(
  task: Task, runs: list[Run], sharing: int
) -> dict[str, Measured]:
  """Returns the measurements of one exchange by metric, the score first."""
  one = Measured
  times = [run.step_ms for run in runs]
  sent, compiled = runs[0].wire_bytes, runs[0].compiled_bytes
  return {
    task.metric: records.average_repeats([r.score for r in runs], task.unit),
    "loss": one(statistics.fmean(run.loss for run in runs), "nats"),
    "wire_bytes_predicted": one(sent, "bytes/step/worker"),
    "wire_bytes_compiled": one(compiled, "bytes/step/worker"),
    "compile_s": one(runs[0].compile_s, "s"),
    "step_ms": one(statistics.median(times), "ms", records.find_spread(times)),
    **{
      f"exchange_ms_{link}": one(8e3 * sharing * sent / speed, _COMPUTED)
      for link, speed in LINK_SPEEDS.items()
    },
  }


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns score, bytes and times, a line for each exchange."""
  if rows[0].experiment == SHARDED_MEMORY:
    return _memory_table(rows)
  found = tables.index_rows(rows)
  metric, unit = rows[0].metric, rows[0].unit
  digits = 2 if unit == "%" else 3
  lines = []
  for row in [row for row in rows if row.metric == metric]:
    ratio = found.get((row.case, "wire_ratio"))
    lines.append(
      (
        row.case,
        tables.format_noise(row, digits),
        tables.format_gap(row, digits),
        f"{found[row.case, 'wire_bytes_compiled'].value:,.0f}",
        "-" if ratio is None else f"{ratio.value:.2f}",
        f"{found[row.case, 'step_ms'].value:.1f}",
        *(
          f"{found[row.case, f'exchange_ms_{link}'].value:.3g}"
          for link in ("100mbit", "1gbit")
        ),
      )
    )
  header = (
    "exchange",
    f"{metric.replace('_', ' ')}, {unit}",
    f"to fp32, {'points' if unit == '%' else unit}",
    "bytes a step",
    "ratio",
    "step, ms",
    "at 100 Mbit/s, ms",
    "at 1 Gbit/s, ms",
  )
  return Table(
    header,
    lines,
    title=f"{rows[0].experiment} on {rows[0].machine}, JAX {rows[0].jax}",
    caption="± is the standard deviation over the seeds. The last two"
    " columns are computed from the bytes, not measured.",
  )


SHARDED_MEMORY = "train_sharded_memory"
"""Name of the experiment of memory and bytes of sharded parameters."""


def _memory_table(rows: Sequence[Row]) -> Table:
  """Returns memory and bytes, a line for each way to shard parameters."""
  metrics = {
    "held": "held",
    "temporary": "temporary",
    "hosts": "between hosts",
    "devices": "within a host",
  }
  found = tables.index_rows(rows)

  def show(case: str, metric: str) -> str:
    row = found.get((case, metric))
    return "-" if row is None else f"{row.value:.3f}"

  lines = [
    (case, *(show(case, metric) for metric in metrics))
    for case in dict.fromkeys(row.case for row in rows)
  ]
  return Table(("case", *metrics.values()), lines)
