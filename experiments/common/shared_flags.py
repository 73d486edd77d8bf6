"""Flags that several runners define, and the start of a runner.

A process may import more than one runner.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from experiments.common import signals
from experiments.common.console import JobError, describe_failure

flags.disclaim_key_flags()  # They are key flags of the runner that asks.

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def run_main(main: Callable[[], None]) -> None:
  """Parses the flags of the command line, then calls a runner's `main`.

  Does not return: the process exits with the runner's exit code.

  Args:
    main: function without arguments that reads the parsed flags.

  Raises:
    SystemExit: always; a flag that does not exist or a positional argument
      prints the usage and gives exit code 1. A job that is refused, stopped by
      a signal, or refused a file by the system, ends with one line.
  """

  def call(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f"Flags must start with --, got {argv[1]!r}.")
    try:
      main()
    except JobError as error:
      raise SystemExit(f"Stopped: {error}") from error
    except OSError as error:
      raise SystemExit(f"Stopped: {describe_failure(error)}") from error
    except KeyboardInterrupt as stop:
      raise SystemExit(signals.say_stopped(stop)) from stop

  app.run(call)


def define_config(
  name: str, text: str = "Configuration to run."
) -> flags.FlagHolder[Any]:
  """Defines the flag `--config`.

  Args:
    name: name of the default file in `configs`.
    text: help text.
  """
  # Kernels are timed on machines that have few packages.
  from ml_collections import config_flags

  return config_flags.DEFINE_config_file(
    "config", str(_CONFIGS / f"{name}.py"), text, allow_override=True
  )


def define_rows() -> flags.FlagHolder[str | None]:
  """Defines the flag `--json`."""
  return flags.DEFINE_string(
    "json", None, "Where to write rows (JSON Lines).", allow_override=True
  )


def define_plot() -> flags.FlagHolder[str | None]:
  """Defines the flag `--plot`."""
  return flags.DEFINE_string(
    "plot", None, "Where to write the plot (PNG).", allow_override=True
  )


def define_workdir() -> flags.FlagHolder[str | None]:
  """Defines the flag `--workdir`."""
  return flags.DEFINE_string(
    "workdir",
    None,
    "Where to keep checkpoints; the same folder resumes.",
    allow_override=True,
  )
