"""Consoles that runners print on, and the one line that ends a job."""

import sys
import traceback

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
  """Returns what the system refused, and for which file, as one line."""
  reason = error.strerror or str(error) or type(error).__name__
  where = f" ({error.filename})" if error.filename else ""
  return " ".join(f"{reason}{where}".split())


def describe_missing_field(error: BaseException) -> str | None:
  """Returns the line for a field that a configuration lacks."""
  package = sys.modules.get("ml_collections")
  frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
  if not package or not frames or not isinstance(error, AttributeError):
    return None
  last = frames[-1]
  is_read = last.f_code.co_name == "__getattr__"
  if not is_read or not isinstance(last.f_locals["self"], package.ConfigDict):
    return None
  # The error of a dictionary puts its message in quotes, and breaks lines.
  text = str(error.args[0].args[0]).replace("\\n", " ")
  return (
    "`--config` must name a configuration with every field that this runner"
    f" reads, got one without {' '.join(text.split())}. A file of `configs`"
    " shows all fields."
  )
