"""Aligned text tables, as `print` of a record shows them."""

from collections.abc import Collection, Sequence


def text_table(
  rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> str:
  """Aligns cells into columns that are two blanks apart.

  >>> print(text_table([("name", "bytes"), ("w", "4"), ("b", "16")], right=[1]))
  name  bytes
  w         4
  b        16
  """
  # rows: all of equal lengths, the header first. right: positions of the
  # columns whose cells are aligned to the right.
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  return "\n".join(
    "  ".join(
      cell.rjust(width) if index in right else cell.ljust(width)
      for index, (cell, width) in enumerate(zip(row, widths, strict=True))
    ).rstrip()
    for row in rows
  )
