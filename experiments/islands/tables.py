"""Tables of islands: simulated, on limited links, and with faults."""

from collections.abc import Sequence

from experiments.common import tables
from experiments.common.records import Row


def summary_table(rows: Sequence[Row]) -> tables.Table:
  """Returns goodput and bytes, a line for each model, number and scheme."""
  if rows[0].experiment == "islands_links":
    return _make_link_table(rows)
  if rows[0].experiment == "islands_faults":
    return _make_fault_table(rows)
  found = tables.index_rows(rows)
  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    every, failing, intact, upload, download = (
      float(found[case, metric].value)
      for metric in (
        *("every", "goodput", "goodput_without_failures"),
        *("upload", "download"),
      )
    )
    figures = f"{100 * failing:.1f}", f"{100 * intact:.1f}"
    bytes_sent = f"{upload:,.0f}", f"{download:,.0f}"
    lines.append((*case.split("/"), f"{every:.0f}", *figures, *bytes_sent))
  return tables.Table(
    (
      *("model", "islands", "scheme", "steps a round", "goodput, %"),
      *("without failures, %", "MB up an hour", "MB down an hour"),
    ),
    lines,
    title=rows[0].machine,
    caption="MB are those of one island.",
    text_columns=(0, 1, 2),
  )


def _make_link_table(rows: Sequence[Row]) -> tables.Table:
  """Returns times and bytes, a line for each link, delay and number."""
  found = tables.index_rows(rows)
  lines = []
  for case in dict.fromkeys(row.case for row in rows):
    utilization, round_s, upload, predicted = (
      float(found[case, metric].value)
      for metric in (
        *("utilization", "round_s"),
        *("wire_bytes", "predicted_bytes"),
      )
    )
    times = f"{100 * utilization:.1f}", f"{round_s:.2f}"
    megabytes = f"{upload / 1e6:.2f}", f"{predicted / 1e6:.2f}"
    lines.append((*case.split("/"), *times, *megabytes))
  return tables.Table(
    (
      *("link", "delay, steps", "fragments", "utilization, %", "round, s"),
      *("MB sent a round", "MB predicted"),
    ),
    lines,
    title=rows[0].machine,
    caption="MB are those of one island, without headers of packets.",
  )


def _make_fault_table(rows: Sequence[Row]) -> tables.Table:
  """Returns counts and the error at the end, a line for each case and seed."""
  found = tables.index_rows(rows)
  lines = [
    (
      *case.split("/"),
      *(
        f"{found[case, metric].value:,}"
        for metric in ("faults", "islands", "processes", "rounds")
      ),
      f"{found[case, 'error'].value:.3f}",
    )
    for case in dict.fromkeys(row.case for row in rows)
  ]
  return tables.Table(
    ("case", "seed", "faults", "islands", "processes", "rounds", "error"),
    lines,
    title=rows[0].machine,
    caption="The error of the anchor is 1 at the start.",
    text_columns=(0, 1),
  )
