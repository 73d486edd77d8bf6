"""Text tables of measurements, rendered on a console or as Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

import rich.table

from experiments.common.records import Row


class Table(NamedTuple):
  """A table of text cells that can be rendered in two ways."""

  header: Sequence[str]  # Heading of each column.
  lines: Sequence[Sequence[str]]  # Cells of each line, one for each column.
  title: str = ""  # Text above the table on a console.
  caption: str = ""  # Text below the table on a console.
  # Indices of the columns aligned to the left on a console; the others hold
  # numbers.
  text_columns: Sequence[int] = (0,)

  def to_markdown(self) -> str:
    """Returns the header and the lines as a Markdown table."""
    rules = "---|" * len(self.header)
    rendered = [f"| {' | '.join(line)} |" for line in self.lines]
    return "\n".join([f"| {' | '.join(self.header)} |", f"|{rules}", *rendered])

  def to_console(self) -> rich.table.Table:
    """Returns a rich table with the title and the caption."""
    table = rich.table.Table(
      title=self.title or None, caption=self.caption or None
    )
    for i, heading in enumerate(self.header):
      is_text = i in self.text_columns
      table.add_column(
        heading,
        justify="left" if is_text else "right",
        overflow="fold" if is_text else "ellipsis",
      )
    for line in self.lines:
      table.add_row(*line)
    return table


def index_rows(rows: Sequence[Row]) -> dict[tuple[str, str], Row]:
  """Returns the rows of one experiment by (case, metric)."""
  return {(row.case, row.metric): row for row in rows}


def format_noise(row: Row, digits: int = 2) -> str:
  """Returns a value with its standard deviation, as in `97.50 ± 0.71`."""
  noise = "" if row.noise is None else f" ± {row.noise:.{digits}f}"
  return f"{float(row.value):.{digits}f}{noise}"


def format_gap(row: Row, digits: int = 2) -> str:
  """Returns value minus baseline with its sign, `-` without a baseline."""
  if row.baseline is None:
    return "-"
  return f"{float(row.value) - row.baseline:+z.{digits}f}"
