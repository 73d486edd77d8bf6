"""Tables of cases timed on hosts: a short one, and one with bytes."""

from collections.abc import Sequence

from experiments.common import records, tables

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


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns step times and ratios, a line for each case."""
  found = tables.index_rows(rows)
  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    line = [case, tables.format_noise(found[case, "step_ms"], digits=1)]
    for metric in _RATIOS:
      row = found.get((case, metric))
      line.append("" if row is None else f"{row.value:.2f}")
    lines.append(line)
  return tables.Table(("exchange", "step, ms", *_RATIOS.values()), lines)


def byte_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the summary with megabytes, and a mark for cases slower than
  fp32."""
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
  return tables.Table(
    (*summary.header, *_BYTES.values(), ""),
    lines,
    title=f"{rows[0].experiment} on {rows[0].machine}, JAX {rows[0].jax}",
    caption="± is the standard deviation over the rounds. MB a step and host."
    " T* is what the link allows: the step without exchange, and the fp32"
    " exchange shortened by the ratio of bytes.",
    text_columns=(0, len(summary.header) + len(_BYTES)),
  )
