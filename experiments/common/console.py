"""Where runners print."""

import rich.console

_PLAIN_WIDTH = 132  # Columns of a table where there is no terminal.


def make_console() -> rich.console.Console:
  """A console that is wide enough for tables where there is no terminal."""
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=_PLAIN_WIDTH)
  return console
