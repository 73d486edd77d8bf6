"""Consoles that runners print on, and the one line that ends a job."""

import sys

import rich.console

_PLAIN_WIDTH = 132  # Columns where there is no terminal.


class JobError(ValueError):
  """Refusal or failure of a job that its one line explains in full."""


def make_console() -> rich.console.Console:
  """Returns a console that is wide enough for tables without a terminal."""
  console = rich.console.Console()
  if not console.is_terminal:
    console = rich.console.Console(width=_PLAIN_WIDTH)
  return console


def print_notice(text: str) -> None:
  """Prints a line about the job itself, such as what it resumes from."""
  print(text, file=sys.stderr, flush=True)


def describe_failure(error: OSError) -> str:
  """Returns what the system refused, and for which file, as one line.

  Args:
    error: error of a call to the system.
  """
  reason = error.strerror or str(error) or type(error).__name__
  where = f" ({error.filename})" if error.filename else ""
  return " ".join(f"{reason}{where}".split())
