"""Flags that several runners have: a process may import more than one."""

import pathlib
from typing import Any

from absl import flags

flags.disclaim_key_flags()  # They are those of the runner that asks for them.

_CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def config(name: str, text: str = "What to run.") -> flags.FlagHolder[Any]:
  """Defines `--config`.

  Args:
    name: of the file among `configs` that is taken by default.
    text: what is said of it.
  """
  # Benches run on machines that have few packages.
  from ml_collections import config_flags

  return config_flags.DEFINE_config_file(
    "config", str(_CONFIGS / f"{name}.py"), text, allow_override=True
  )


def rows() -> flags.FlagHolder[str | None]:
  """Defines `--json`."""
  return flags.DEFINE_string(
    "json", None, "Where to write rows (JSON Lines).", allow_override=True
  )


def plot() -> flags.FlagHolder[str | None]:
  """Defines `--plot`."""
  return flags.DEFINE_string(
    "plot", None, "Where to write the plot (PNG).", allow_override=True
  )


def workdir() -> flags.FlagHolder[str | None]:
  """Defines `--workdir`."""
  return flags.DEFINE_string(
    "workdir",
    None,
    "Where to keep checkpoints; the same folder resumes.",
    allow_override=True,
  )
