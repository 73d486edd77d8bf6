"""Measurements as JSON Lines: one row a measurement, one schema for all."""

import json
import os
import pathlib
import platform
from collections.abc import Iterable
from typing import NamedTuple

import jax


class Row(NamedTuple):
  """One measurement.

  Attributes:
    experiment: name of the configuration's experiment.
    case: name of the codec, or of what else was measured.
    metric: what was measured; names are shared between experiments.
    value: the measurement.
    unit: of `value`, `baseline` and `noise`.
    baseline: the same measurement of the `fp32` case, if there is one.
    ratio: `value / baseline`.
    noise: sample standard deviation over the seeds, if there are several.
    machine: what it ran on.
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
  """Describes this machine: system, processor, cores, devices, processes."""
  devices = jax.devices()
  kind = f"{len(devices)} x {devices[0].platform} {devices[0].device_kind}"
  if jax.process_count() > 1:
    kind += f", {jax.process_count()} processes"
  return (
    f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {kind}"
  )


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
  """Writes rows to `path`, replacing what was there in one step."""
  write_lines(path, (row._asdict() for row in rows))


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
  """Reads back what `write_rows` wrote."""
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
