"""Figures of one network in one mode: compiled, predicted and measured."""

from typing import NamedTuple

import jax

from experiments.residuals import cases, device, measure, networks


class Point(NamedTuple):
  """One network at one batch in one mode, with its figures.

  Attributes:
    spec: the network and its batch.
    mode: name of the mode, a key of `MODES`.
    memory: memory of the compiled step, or the compiler's error.
    prediction: predicted figures; None if the step was not compiled.
    measured: figures measured on a GPU; None without a GPU.
  """

  spec: networks.NetworkSpec
  mode: str
  memory: measure.StepMemory | str
  prediction: measure.PredictedStep | None
  measured: device.Measured | None


def measure_point(
  spec: networks.NetworkSpec,
  mode: str,
  target: str,
  memory_gib: float | None = None,
) -> Point:
  """Compiles and predicts a step, and measures it if this machine has a GPU."""
  step = cases.build_step(mode, spec.make_network(), spec.batch)
  try:
    memory = measure.compile_step(step, target, memory_gib)
  except jax.errors.JaxRuntimeError as error:
    return Point(spec, mode, str(error).splitlines()[0], None, None)
  prediction = measure.predict_figures(step, memory.host_temp_bytes, target)
  measured = None
  if device.has_gpu():
    measured = device.measure_step(
      spec.name, dict(spec.options), spec.batch, mode
    )
  return Point(spec, mode, memory, prediction, measured)
