"""All that is known of one network at one batch in one mode."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import rich.progress

from experiments import models
from experiments.common import records
from experiments.common.console import make_console
from experiments.residuals import cases, device, measure

# Rows whose ratio to `plain` says what a mode saves and costs.
_COMPARED = (
  "temp_bytes",
  "device_bytes",
  "flops",
  "traffic_bytes_predicted",
  "step_ms_predicted",
  "peak_bytes_in_use",
  "step_ms",
)


class Spec(NamedTuple):
  """What is to be found out about.

  Attributes:
    name: of the network.
    batch: examples.
    options: of the network.
  """

  name: str
  batch: int
  options: Mapping[str, Any] = MappingProxyType({})

  @property
  def case(self) -> str:
    """As it is called in rows."""
    options = "".join(f"_{k}{v}" for k, v in self.options.items())
    return f"{self.name}{options}_batch{self.batch}"

  def make(self) -> models.Network:
    """The network."""
    return models.make_network(self.name, **self.options)


def parse(names: Sequence[str]) -> list[Spec]:
  """Reads networks and batches.

  Args:
    names: each NAME:BATCH, and then maybe :OPTION=NUMBER of the network's.

  Raises:
    ValueError: it is not of this form.

  Example:
    >>> [spec] = parse(["gpt:8:layers=48"])
    >>> spec.name, spec.batch, spec.options
    ('gpt', 8, {'layers': 48})
    >>> spec.case
    'gpt_layers48_batch8'
  """
  return [_spec(text) for text in names]


def _spec(text: str) -> Spec:
  try:
    name, batch, *options = text.split(":")
    pairs = [option.split("=") for option in options]
    return Spec(name, int(batch), {k: json.loads(v) for k, v in pairs})
  except ValueError as e:
    raise ValueError(
      f"`networks` must be NAME:BATCH or NAME:BATCH:OPTION=NUMBER, got {text!r}"
      "."
    ) from e


class Point(NamedTuple):
  """What was found out.

  Attributes:
    spec: of what.
    mode: of `MODES`.
    memory: as compiled, or why it was not.
    prediction: as predicted; None with `memory`.
    measured: on a GPU; None if there is none.
  """

  spec: Spec
  mode: str
  memory: measure.Memory | str
  prediction: measure.Prediction | None
  measured: device.Measured | None


def find(
  spec: Spec, mode: str, target: str, memory_gib: float | None = None
) -> Point:
  """Compiles and predicts, and measures if this machine has a GPU."""
  job = cases.job(mode, spec.make(), spec.batch)
  try:
    memory = measure.compile_step(job, target, memory_gib)
  except jax.errors.JaxRuntimeError as error:
    return Point(spec, mode, str(error).splitlines()[0], None, None)
  prediction = measure.predict(job, memory.host_temp_bytes, target)
  measured = None
  if device.there_is_one():
    measured = device.measure(spec.name, dict(spec.options), spec.batch, mode)
  return Point(spec, mode, memory, prediction, measured)


def find_all(
  specs: Sequence[Spec],
  modes: Sequence[str],
  target: str,
  experiment: str,
  path: str | os.PathLike[str] | None = None,
  memory_gib: float | None = None,
) -> list[records.Row]:
  """Rows of every network in every mode.

  Args:
    specs: networks and batches.
    modes: of training.
    target: to compile for.
    experiment: what rows say that they are of.
    path: where rows are written as they come.
    memory_gib: memory that the compiler is told of.
  """
  points: list[Point] = []
  found: list[records.Row] = []
  jobs = [(spec, mode) for spec in specs for mode in modes]
  for spec, mode in rich.progress.track(
    jobs, "compile", console=make_console()
  ):
    points.append(find(spec, mode, target, memory_gib))
    found = list(rows(experiment, points, target))
    if path:
      records.write_rows(path, found)
  return found


def rows(
  experiment: str, points: Sequence[Point], target: str
) -> Iterator[records.Row]:
  """Rows of points; baselines are those of `plain` of the same network."""
  plain = {p.spec.case: dict(_figures(p)) for p in points if p.mode == "plain"}
  for point in points:
    case = f"{point.spec.case}/{point.mode}"
    for metric, value in _figures(point):
      base = plain.get(point.spec.case, {}).get(metric)
      if metric not in _COMPARED or isinstance(base, str):
        base = None
      ratio = None
      if base and not isinstance(value, str):
        ratio = value / base
      yield records.Row(
        experiment,
        case,
        metric,
        value,
        _unit(metric),
        base,
        ratio,
        None,
        _machine(metric, point, target),
        jax.__version__,
      )


def _figures(point: Point) -> Iterator[tuple[str, float | str]]:
  memory, prediction = point.memory, point.prediction
  if isinstance(memory, str) or prediction is None:
    yield "temp_bytes", f"none: {memory}"
    return
  yield "temp_bytes", memory.temp_bytes
  yield "host_temp_bytes", memory.host_temp_bytes
  yield "argument_bytes", memory.argument_bytes
  yield "result_bytes", memory.result_bytes
  yield "device_bytes", memory.device_bytes
  yield "compile_s", memory.compile_s
  yield "flops", prediction.flops
  yield "traffic_bytes_predicted", prediction.bytes
  yield "step_ms_predicted", 1e3 * prediction.step_s
  measured = point.measured
  if measured is None or measured.reason:
    why = measured.reason if measured else "no GPU"
    yield "peak_bytes_in_use", f"not measured: {why}"
    yield "step_ms", f"not measured: {why}"
    return
  peak = measured.peak_bytes
  yield "peak_bytes_in_use", "not measured" if peak is None else peak
  yield "step_ms", measured.step_ms


def _unit(metric: str) -> str:
  if "bytes" in metric:
    return "bytes"
  return {"compile_s": "s", "flops": "FLOP"}.get(metric, "ms")


def _machine(metric: str, point: Point, target: str) -> str:
  if metric in ("step_ms", "peak_bytes_in_use", "compile_s"):
    return records.describe_machine()
  if metric in ("flops", "traffic_bytes_predicted", "step_ms_predicted"):
    return f"{measure.TARGETS[target]}: predicted from datasheets"
  return point.memory.machine if not isinstance(point.memory, str) else target
