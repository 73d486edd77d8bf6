"""Consoles that runners print on."""

import rich.console

_PLAIN_WIDTH = 132  # Columns where there is no terminal.


def make_console() -> rich.console.Console:
  """Returns a console that is wide enough for tables without a terminal."""
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=_PLAIN_WIDTH)
  return console
