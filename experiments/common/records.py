"""Rows: measurements as JSON Lines, with one schema for all experiments."""

import functools
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

import jaxmotion
from experiments.common import files
from experiments.common.files import FileError, MissingFileError

_NUMBER_OR_NOTHING = (int, float, type(None))
_TYPES: dict[str, tuple[type, ...]] = {
  "value": (int, float, str),
  "baseline": _NUMBER_OR_NOTHING,
  "ratio": _NUMBER_OR_NOTHING,
  "noise": _NUMBER_OR_NOTHING,
}
"""Types of the fields of a row that are not text."""


class Row(NamedTuple):
  """One measurement of one case."""

  experiment: str  # Name of the experiment; the first word is the command.
  case: str  # Name of the case, such as a codec.
  metric: str  # Name of the quantity, shared between experiments.
  value: float | str  # The measured number, or text such as a reason.
  unit: str  # Unit of `value`, `baseline` and `noise`.
  baseline: float | None  # The same measurement of the baseline case, if any.
  ratio: float | None  # `value / baseline`.
  noise: float | None  # Sample standard deviation, if it was repeated.
  machine: str  # Description of the machine and its devices.
  jax: str  # Version of JAX.


class Measured(NamedTuple):
  """One figure of a case before its baseline and machine are known."""

  value: Any  # A number, or text such as a reason.
  unit: str
  noise: float | None = None


Metrics = Mapping[str, Measured]
"""Figures of one case by the name of the metric."""


def describe_machine() -> str:
  """Returns system, processor, cores, devices and processes as text."""
  devices = jax.devices()
  kind = f"{len(devices)} x {devices[0].platform} {devices[0].device_kind}"
  if jax.process_count() > 1:
    kind += f", {jax.process_count()} processes"
  return (
    f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {kind}"
  )


def make_row(
  experiment: str,
  case: str,
  metric: str,
  measured: Measured,
  baseline: float | str | None = None,
  *,
  machine: str | None = None,
  version: str = jax.__version__,
) -> Row:
  """Returns the row of a figure, of this run unless a machine is given."""
  value, unit, noise = measured
  base = None if isinstance(baseline, str) else baseline
  ratio = value / base if base and not isinstance(value, str) else None
  machine = describe_run() if machine is None else machine
  key = (experiment, case, metric, value, unit)
  return Row(*key, base, ratio, noise, machine, version)


def make_rows(
  experiment: str,
  cases: Mapping[str, Metrics],
  base: Metrics = MappingProxyType({}),
  *,
  machine: str | None = None,
  version: str = jax.__version__,
) -> list[Row]:
  """Returns a row for each case and metric, beside those of a baseline."""
  return [
    make_row(
      *(experiment, case, metric, measured),
      base[metric].value if metric in base else None,
      machine=machine,
      version=version,
    )
    for case, metrics in cases.items()
    for metric, measured in metrics.items()
  ]


def average_repeats(values: Sequence[float], unit: str) -> Measured:
  """Returns the mean of repeats and their sample standard deviation."""
  return Measured(statistics.fmean(values), unit, find_spread(values))


def find_spread(values: Sequence[float]) -> float | None:
  """Returns the sample standard deviation, None of a single value."""
  return statistics.stdev(values) if len(values) > 1 else None


def write_rows(
  path: str | os.PathLike[str] | None, rows: Iterable[Row]
) -> None:
  """Writes rows to a file, in one step; a path of None writes nothing."""
  if path:
    write_lines(path, (row._asdict() for row in rows))


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
  """Reads rows that `write_rows` wrote."""
  return [
    _make_row(f"{str(path)!r} line {number}", line)
    for number, line in enumerate(_parse_lines(path), 1)
  ]


def _make_row(where: str, fields: dict) -> Row:
  if set(fields) != set(Row._fields):
    wrong = sorted(set(fields) ^ set(Row._fields))
    raise FileError(
      f"{where} must have the fields {', '.join(Row._fields)}, and differs in"
      f" {', '.join(map(repr, wrong))}."
    )
  for name, value in fields.items():
    if type(value) not in _TYPES.get(name, (str,)):
      kinds = " or ".join(t.__name__ for t in _TYPES.get(name, (str,)))
      raise FileError(f"{where}: `{name}` must be {kinds}, got {value!r}.")
  return Row(**fields)


def write_lines(path: str | os.PathLike[str], lines: Iterable[dict]) -> None:
  """Writes one JSON object a line; a killed writer leaves the old file."""
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + ".partial")
  with partial.open("w") as file:
    for line in lines:
      file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())
  os.replace(partial, path)


def read_lines(path: str | os.PathLike[str]) -> list[dict]:
  """Reads one JSON object a line; an absent file has none."""
  try:
    return _parse_lines(path)
  except MissingFileError:
    return []


def _parse_lines(path: str | os.PathLike[str]) -> list[dict]:
  lines = files.read_text(path).removesuffix("\n").split("\n")
  if lines == [""]:
    return []
  return [_parse_line(path, i, line) for i, line in enumerate(lines, 1)]


def _parse_line(path: str | os.PathLike[str], number: int, line: str) -> dict:
  try:
    return files.parse_object(line)
  except ValueError as error:
    raise FileError(
      f"{str(path)!r} line {number} must be a JSON object: {error}."
    ) from error


_ROOT = Path(__file__).parents[2]


def describe_run(link: str = "") -> str:
  """Returns the machine, the kind of its links, and the commit."""
  sources = describe_sources(("jaxmotion", "experiments"))
  return f"{describe_machine()}{link and ', '}{link}; {sources}"


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

  >>> drop_sources("CPU: compiled, not run; commit 0123456 with changes")
  'CPU: compiled, not run'
  """
  return re.sub(r"; (commit|version) [^;]*$", "", machine)


def read_cases(path: str | os.PathLike[str] | None) -> dict[str, list[Row]]:
  """Reads the rows of a file by case; an absent file has none."""
  kept: dict[str, list[Row]] = {}
  if path is not None and os.path.exists(path):
    for row in read_rows(path):
      kept.setdefault(row.case, []).append(row)
  return kept
