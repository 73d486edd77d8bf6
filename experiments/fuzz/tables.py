"""Table of generated cases, a line for each subject."""

from collections.abc import Sequence

from experiments.common.records import Row
from experiments.common.tables import Table, index_rows


def summary_table(rows: Sequence[Row]) -> Table:
  """Returns the counts of each subject.

  Args:
    rows: made by `rows.make_rows`.
  """
  found = index_rows(rows)
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
  return Table(
    ("subject", "rounds", "cases", "seconds", "defects"),
    lines,
    title=f"{rows[0].machine}, JAX {rows[0].jax}",
    caption="seconds are summed over processes",
  )
