"""Rows and tables of cases timed on hosts, with what the link allows."""

import os
from collections.abc import Sequence

from experiments.common import records, tables
from experiments.common.records import Measured, Row
from experiments.common.tables import Table
from experiments.hosts import links
from experiments.hosts.run import Result, Setting

# Cases without any exchange.
_ALONE = ("none", "torch_none")


def ideal_ms(
  result: Result, none: Result, fp32: Result, rtt_ms: float
) -> float:
  """Returns the step time that the link allows, in milliseconds."""
  # T* = N + D + (F - N - D) / r: the step without exchange, the round trip that
  # any exchange waits for, and the remaining fp32 exchange divided by the ratio
  # of the bytes that the interfaces counted.
  # `rtt_ms`: round trip D, milliseconds.
  ratio = fp32.interface_bytes / max(result.interface_bytes, 1.0)
  remaining = max(fp32.step_ms - none.step_ms - rtt_ms, 0.0)
  return none.step_ms + rtt_ms + remaining / ratio


def floor_ms(result: Result, setting: Setting) -> float:
  """Returns the least time of a step whose exchange overlaps perfectly."""
  # max(C H / cores, B / rate): hosts share the cores of this machine, and bytes
  # B pass the link while they compute. C is the CPU time of the host's process,
  # without what the kernel does for its packets.
  cores = len(os.sched_getaffinity(0))
  computing_ms = result.process_ms * setting.hosts / cores
  if setting.rate == "loopback":
    return computing_ms
  bits = 8 * result.interface_bytes
  return max(computing_ms, 1e3 * bits / links.parse_rate(setting.rate))


def make_rows(results: Sequence[Result], setting: Setting) -> list[Row]:
  """Returns the rows of all results, in the order of the cases."""
  by_case = {result.case: result for result in results}
  none, fp32 = by_case.get("none"), by_case.get("fp32")
  rows = []
  for result in results:
    for metric, value in _derive_metrics(result, none, fp32, setting).items():
      is_time = metric == "step_ms"
      noise = result.noise_ms if is_time else None
      measured = Measured(value, _find_unit(metric), noise)
      base = fp32.step_ms if fp32 and is_time else None
      key = (setting.experiment, result.case, metric)
      rows.append(records.make_row(*key, measured, base))
  return rows


def _derive_metrics(
  result: Result, none: Result | None, fp32: Result | None, setting: Setting
) -> dict[str, float]:
  """Returns times, bytes and ratios of a case by metric."""
  found = {
    "step_ms": result.step_ms,
    "process_ms": result.process_ms,
    "floor_ms": floor_ms(result, setting),
    "interface_bytes": result.interface_bytes,
    "wire_bytes_counted": result.wire_bytes,
  }
  if result.predicted_bytes is not None:
    found["wire_bytes_predicted"] = result.predicted_bytes
  if fp32 and result.case not in _ALONE:
    found["speedup"] = fp32.step_ms / result.step_ms
    found["wire_ratio"] = fp32.interface_bytes / result.interface_bytes
    if none:
      ideal = ideal_ms(result, none, fp32, setting.rtt_ms)
      found["ideal_ratio"] = result.step_ms / ideal
  return found


def _find_unit(metric: str) -> str:
  if metric.endswith("_ms"):
    return "ms"
  return "bytes" if "bytes" in metric else "x"


_RATIOS = {
  "speedup": "over fp32",
  "ideal_ratio": "T / T*",
  "wire_ratio": "fewer bytes",
}
_BYTES = {
  "interface_bytes": "MB counted",
  "wire_bytes_counted": "without headers",
  "wire_bytes_predicted": "predicted",
}


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns step times and ratios, a line for each case."""
  found = tables.index_rows(rows)
  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    line = [case, tables.format_noise(found[case, "step_ms"], digits=1)]
    for metric in _RATIOS:
      row = found.get((case, metric))
      line.append("" if row is None else f"{row.value:.2f}")
    lines.append(line)
  return Table(("exchange", "step, ms", *_RATIOS.values()), lines)


def byte_table(rows: Sequence[Row]) -> Table:
  """Returns the summary in megabytes, with marks where fp32 is faster."""
  found = tables.index_rows(rows)
  summary = summary_table(rows)
  lines = []
  for case, *cells in summary.lines:
    for metric in _BYTES:
      row = found.get((case, metric))
      cells.append("" if row is None else f"{float(row.value) / 1e6:.3f}")
    speedup = found.get((case, "speedup"))
    is_slower = speedup is not None and float(speedup.value) < 1.0
    lines.append(
      (case, *cells, "slower than fp32: do not" if is_slower else "")
    )
  return Table(
    (*summary.header, *_BYTES.values(), ""),
    lines,
    title=f"{rows[0].experiment} on {rows[0].machine}, JAX {rows[0].jax}",
    caption="± is the standard deviation over the rounds. MB a step and host."
    " T* is what the link allows: the step without exchange, and the fp32"
    " exchange shortened by the ratio of bytes.",
    text_columns=(0, len(summary.header) + len(_BYTES)),
  )
