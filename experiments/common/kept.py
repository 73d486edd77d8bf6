"""Rows that were measured before, and the sources that they are of."""

import functools
import os
import pathlib
import re
import subprocess

import jaxmotion
from experiments.common import records

_ROOT = pathlib.Path(__file__).parents[2]


@functools.cache
def describe_sources(paths: tuple[str, ...]) -> str:
  """Returns the last commit of sources; without git, the library's version."""

  def run_git(*words: str) -> str:
    command = ["git", "-C", str(_ROOT), *words, "--", *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()

  try:
    commit = run_git("log", "-1", "--format=%h")
    if commit:
      changed = run_git("status", "--porcelain")
      return f"commit {commit}{' with changes' if changed else ''}"
  except OSError:
    pass
  return f"version {jaxmotion.__version__}"


def drop_sources(machine: str) -> str:
  """Returns the text of a row's machine without what `describe_sources` says.

  Args:
    machine: machine and sources of a row.

  Example:
    >>> drop_sources("CPU: compiled, not run; commit 0123456 with changes")
    'CPU: compiled, not run'
  """
  return re.sub(r"; (commit|version) [^;]*$", "", machine)


def read_cases(
  path: str | os.PathLike[str] | None,
) -> dict[str, list[records.Row]]:
  """Reads the rows of a file by case; an absent file has none."""
  kept: dict[str, list[records.Row]] = {}
  if path is not None and os.path.exists(path):
    for row in records.read_rows(path):
      kept.setdefault(row.case, []).append(row)
  return kept
