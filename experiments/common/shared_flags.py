"""Flags that several runners define, and the start of a runner.

A process may import more than one runner. Files that runners write are checked
while the flags are parsed, before any work.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from experiments.common import console, files, signals
from experiments.common.console import JobError
from experiments.common.files import FileError

flags.disclaim_key_flags()  # They are key flags of the runner that asks.

_CONFIGS = Path(__file__).parents[2] / "configs"


def run_main(main: Callable[[], None]) -> None:
  """Parses the flags of the command line, then calls a runner's `main`."""
  # Does not return: the process exits with the runner's exit code.

  def call(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      raise app.UsageError(f"Flags must start with --, got {argv[1]!r}.")
    try:
      main()
    except JobError as error:
      raise SystemExit(f"Stopped: {error}") from error
    except OSError as error:
      raise SystemExit(f"Stopped: {console.describe_failure(error)}") from error
    except AttributeError as error:
      if line := console.describe_missing_field(error):
        raise SystemExit(f"Stopped: {line}") from error
      raise
    except KeyboardInterrupt as error:
      print(signals.describe_stop(signal.SIGINT), file=sys.stderr)
      raise SystemExit(128 + signal.SIGINT) from error

  app.run(call, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
  try:
    rest = app.parse_flags_with_usage(argv)
  # A field that a configuration does not have raises what its container does.
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise SystemExit(_explain_field(error)) from error
  if "config" in flags.FLAGS:
    config: Any = flags.FLAGS["config"].value
    # The parser of tuples leaves words with commas, as `fp32,lion`, as one.
    for name, value in config.items():
      if type(value) is tuple and all(type(one) is str for one in value):
        config[name] = tuple(word for one in value for word in one.split(","))
  # By default absl would show what JAX and orbax log about themselves.
  if flags.FLAGS["verbosity"].using_default_value:
    flags.FLAGS.verbosity = logging.WARNING  # type: ignore[assignment]
  return rest


def _explain_field(error: Exception) -> str:
  return (
    "`--config.FIELD` must be a field of the configuration, got"
    f" {' '.join(str(error).split())}."
  )


class _ConfigParser(flags.ArgumentParser):
  """Runs a configuration file and returns what its `get_config` returns."""

  def parse(self, path: str) -> Any:
    """Returns the configuration; errors are one line."""
    from ml_collections import ConfigDict

    path, *argument = path.split(":", 1)
    text = files.read_text(path)
    module: dict[str, Any] = {"__name__": "config", "__file__": path}
    try:
      exec(compile(text, path, "exec"), module)
      config = module["get_config"](*argument) if "get_config" in module else 0
    # It is somebody's program, which can raise anything.
    except Exception as error:
      raise ValueError(_locate_error(error, path)) from error
    if not isinstance(config, ConfigDict):
      raise ValueError(
        f"{path!r} must have a function get_config that returns a ConfigDict."
      )
    return config.lock()

  def flag_type(self) -> str:
    """Returns the name of the type for `--help`."""
    return "Python file"


def _locate_error(error: Exception, path: str) -> str:
  """Returns one line with the error and its last line of the file."""
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename == path]
  where = f" at line {lines[-1]}" if lines else ""
  text = " ".join(str(error).split())
  return f"{path!r} raises {type(error).__name__}{where}: {text}"


def define_config(
  name: str, text: str = "Configuration to run."
) -> flags.FlagHolder[Any]:
  """Defines the flag `--config`, whose file is run as Python."""
  # Kernels are timed on machines that have few packages.
  from ml_collections import config_flags

  try:
    holder = config_flags.DEFINE_config_file(
      "config",
      str(_CONFIGS / f"{name}.py"),
      f"{text} The file is run as Python: give only files that you trust.",
      allow_override=True,
    )
  # Fields of the default file are read here, before the flags are parsed.
  except (AttributeError, LookupError, TypeError) as error:
    raise SystemExit(_explain_field(error)) from error
  flags.FLAGS["config"].parser = _ConfigParser()
  return holder


def define_rows() -> flags.FlagHolder[str | None]:
  """Defines the flag `--json`."""
  return define_output("json", "Where to write rows (JSON Lines).")


def define_plot() -> flags.FlagHolder[str | None]:
  """Defines the flag `--plot`."""
  text = "Where to write the plot (PNG; the suffix chooses the format)."
  return define_output("plot", text, files.check_plot)


def define_output(
  name: str,
  text: str,
  check: Callable[[str], None] = files.check_output,
  default: str | None = None,
) -> flags.FlagHolder[str | None]:
  """Defines the flag of a file that a runner writes."""
  holder = flags.DEFINE_string(name, default, text, allow_override=True)

  def is_valid(path: str | None) -> bool:
    if path and _may_write():
      try:
        check(path)
      except FileError as error:
        raise flags.ValidationError(str(error)) from error
    return True

  flags.register_validator(name, is_valid)
  return holder


def _may_write() -> bool:
  """Returns whether this process writes: of several only the first does."""
  index = os.environ.get("JAX_PROCESS_ID", "0")
  if (
    "process_id" in flags.FLAGS and flags.FLAGS["process_id"].value is not None
  ):
    index = flags.FLAGS["process_id"].value
  return str(index) == "0"


def define_fresh() -> flags.FlagHolder[bool]:
  """Defines the flag `--fresh`."""
  text = "Measure again what is in --json."
  return flags.DEFINE_bool("fresh", False, text, allow_override=True)


def define_repeats(count: int) -> flags.FlagHolder[int]:
  """Defines the flag `--repeats`."""
  text = "Interleaved repeats."
  return flags.DEFINE_integer("repeats", count, text, 1, allow_override=True)


def define_workdir() -> flags.FlagHolder[str | None]:
  """Defines the flag `--workdir`."""
  return flags.DEFINE_string(
    "workdir",
    None,
    "Where to keep checkpoints; the same folder resumes.",
    allow_override=True,
  )


def define_tensorboard() -> flags.FlagHolder[str | None]:
  """Defines the flag `--tensorboard`."""
  text = "Folder for TensorBoard; each run has a folder in it."
  return define_output("tensorboard", text, files.check_folder)
