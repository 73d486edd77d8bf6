"""Table of the study: scores, bytes and what the baseline's budgets buy."""

from collections.abc import Sequence

from experiments.common import records, tables
from experiments.study import trainer
from experiments.study.rows import DIVERGED

_NOTHING = "-"


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns a line for each algorithm."""
  found = tables.index_rows(rows)
  longest = rows[0].metric
  metric, steps = longest.rsplit("_", 1)
  unit, digits = rows[0].unit, 2 if rows[0].unit == "%" else 3
  prefix = f"{metric}_equal_bytes_"
  spent = max(
    (int(r.metric.removeprefix(prefix)) for r in rows if prefix in r.metric),
    default=0,
  )
  budgets = [f"{metric}_equal_bytes_{spent}"]
  budgets += [f"{metric}_equal_time_{link}_{spent}" for link in trainer.LINKS]

  def format_budget(case: str, name: str) -> str:
    row = found.get((case, name))
    return _NOTHING if row is None else f"{float(row.value):.{digits}f}"

  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    row = found[case, longest] if (case, longest) in found else None
    sent = found[case, "wire_bytes"]
    rates = [found.get((case, name)) for name in ("rate", "outer_rate")]
    has_score = row is not None and row.value != DIVERGED
    lines.append(
      (
        case,
        ", ".join(f"{float(r.value):.2g}" for r in rates if r is not None),
        tables.format_noise(row, digits)
        if row and has_score
        else (DIVERGED if row else _NOTHING),
        _NOTHING
        if sent.baseline is None
        else f"{sent.baseline / float(sent.value):.1f}",
        f"{float(found[case, 'step_ms'].value):.1f}",
        *(format_budget(case, name) for name in budgets),
      )
    )
  header = (
    "algorithm",
    "rates",
    f"{metric.replace('_', ' ')}{', %' * (unit == '%')}, {steps} steps",
    "fewer bytes",
    "step, ms",
    f"bytes of {spent} steps of fp32",
    "time at 10 Mbit/s",
    "at 100 Mbit/s",
    "at 1 Gbit/s",
  )
  return tables.Table(
    header,
    lines,
    title=f"{rows[0].experiment} on {rows[0].machine}, JAX {rows[0].jax}",
    caption="± is the standard deviation over the seeds. The last four columns"
    f" are scores that the bytes, and the time, of {spent} steps of fp32"
    " buy. Times of steps are emulated, those of links predicted.",
  )
