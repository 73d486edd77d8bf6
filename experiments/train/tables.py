"""Table of training rows: accuracy, bytes and times of each exchange."""

from collections.abc import Sequence

from experiments.common import records, tables
from experiments.train.rows import LINK_SPEEDS


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns score, bytes and times, a line for each exchange."""
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
          for link in LINK_SPEEDS
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
    "at 1 Gbit/s",
    "at 10 Gbit/s",
  )
  return tables.Table(
    header,
    lines,
    title=f"{rows[0].experiment} on {rows[0].machine}, JAX {rows[0].jax}",
    caption="± is the standard deviation over the seeds. The last three"
    " columns are computed from the bytes, not measured.",
  )
