"""Table of generated cases, a line for each subject."""

from collections.abc import Sequence

from experiments.common import records, tables


def summary_table(rows: Sequence[records.Row]) -> tables.Table:
  """Returns the counts of each subject."""
  found = tables.index_rows(rows)
  lines = [
    [
      case,
      *(
        f"{found[case, metric].value:,.0f}"
        for metric in ("rounds", "cases", "seconds", "defects")
      ),
    ]
    for case in dict.fromkeys(row.case for row in rows)
  ]
  return tables.Table(
    ("subject", "rounds", "cases", "seconds", "defects"),
    lines,
    title=f"{rows[0].machine}, JAX {rows[0].jax}",
    caption="seconds are summed over processes",
  )
