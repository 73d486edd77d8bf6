"""Rows: measurements as JSON Lines, with one schema for all experiments."""

import json
import os
import pathlib
import platform
from collections.abc import Iterable
from typing import NamedTuple

import jax


class Row(NamedTuple):
  """One measurement of one case.

  Attributes:
    experiment: name of the experiment; the first word is the command.
    case: name of the case, such as a codec.
    metric: name of the quantity, shared between experiments.
    value: the measured number, or text such as a reason.
    unit: unit of `value`, `baseline` and `noise`.
    baseline: the same measurement of the baseline case, if there is one.
    ratio: `value / baseline`.
    noise: sample standard deviation of `value`, if it was repeated.
    machine: description of the machine and its devices.
    jax: version of JAX.
  """

  experiment: str
  case: str
  metric: str
  value: float | str
  unit: str
  baseline: float | None
  ratio: float | None
  noise: float | None
  machine: str
  jax: str


def describe_machine() -> str:
  """Returns system, processor, cores, devices and processes as text."""
  devices = jax.devices()
  kind = f"{len(devices)} x {devices[0].platform} {devices[0].device_kind}"
  if jax.process_count() > 1:
    kind += f", {jax.process_count()} processes"
  return (
    f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {kind}"
  )


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
  """Writes rows to a file, replacing the old file in one step."""
  write_lines(path, (row._asdict() for row in rows))


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
  """Reads rows that `write_rows` wrote."""
  return [Row(**line) for line in read_lines(path)]


def write_lines(path: str | os.PathLike[str], lines: Iterable[dict]) -> None:
  """Writes one JSON object a line; a killed writer leaves the old file."""
  path = pathlib.Path(path)
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
  path = pathlib.Path(path)
  if not path.exists():
    return []
  return [json.loads(line) for line in path.read_text().splitlines()]
