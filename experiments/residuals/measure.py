"""Figures of a training step: compiled, predicted, and measured on a GPU."""

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags
from jax.extend import core as jax_core

from experiments import gpu_compile, models
from experiments.common import records
from experiments.residuals import cases, networks
from jaxmotion import core, perfmodel
from jaxmotion.core import PyTree

TARGETS = {"h100": "h100_node", "h200": "h200_node", "cpu": "ethernet_10gbit"}
"""Platform that predictions are for, by the target that is compiled for."""


def define_target() -> flags.FlagHolder[str]:
  """Defines the flag that names the device to compile for."""
  return flags.DEFINE_enum(
    *("target", "h100", list(TARGETS), "Device to compile for."),
    allow_override=True,
  )


class StepMemory(NamedTuple):
  """Memory of a step, as its compiler states it."""

  machine: str  # Device that the step was compiled for.
  temp_bytes: int  # Temporaries on the device.
  host_temp_bytes: int  # Temporaries in host memory.
  argument_bytes: int  # Parameters, state and batch.
  result_bytes: int  # Results that overwrite no argument, such as gradients.
  compile_s: float  # Seconds that the compilation took, on this machine.

  @property
  def device_bytes(self) -> int:
    """All bytes that the device must hold."""
    return self.temp_bytes + self.argument_bytes + self.result_bytes


class PredictedStep(NamedTuple):
  """Figures of a step by the performance model."""

  flops: float  # FLOPs of the step, recomputed operations included.
  bytes: float  # Bytes moved between memory and processor.
  step_s: float  # Seconds of a step.
  peak_bytes: float  # Most bytes on the device at once.


def explain_refusal(target: str) -> str | None:
  """Returns the reason why a target cannot be compiled for; None if it can."""
  if target == "cpu":
    return None
  gpu_compile.stay_on_host()
  return gpu_compile.explain_refusal()


def trace_step(step: cases.StepProgram, target: str) -> Any:
  """Traces a step for a target, as `jax.jit(fn).trace` does."""
  if target == "cpu":
    return jax.jit(step.fn).trace(*step.args)
  gpu = gpu_compile.find_gpu(target.upper())
  return gpu_compile.trace_for(step.fn, *step.args, gpu=gpu)


def lower_traced(traced: Any, target: str) -> Any:
  """Lowers a traced step, as its own method `lower` does."""
  if target == "cpu":
    return traced.lower()
  return gpu_compile.lower_for(traced, gpu_compile.find_gpu(target.upper()))


def processor_seconds() -> float:
  """Returns seconds of this process and of its children on all cores."""
  # Other jobs on the machine do not count in these.
  usages = map(
    resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
  )
  return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@core.declare(target=core.choice(TARGETS))
def compile_step(
  step: cases.StepProgram, target: str, memory_gib: float | None = None
) -> StepMemory:
  """Compiles a step and returns its memory."""
  begin = time.monotonic()
  if target == "cpu":
    machine = "CPU: compiled, not run; has no memory of a host beside its own"
    jitted = jax.jit(step.fn, donate_argnums=step.donated)
    needs: Any = jitted.lower(*step.args).compile().memory_analysis()
  else:
    gpu = gpu_compile.find_gpu(target.upper(), memory_gib)
    machine = (
      f"{gpu.kind}, {gpu.memory_gib:g} GiB: compiled, not run; without cuDNN's"
      " workspace"
    )
    needs = gpu_compile.compile_memory(
      step.fn,
      *step.args,
      gpu=target.upper(),
      memory_gib=memory_gib,
      donate_argnums=step.donated,
    )
  return StepMemory(
    machine,
    needs.temp_size_in_bytes,
    needs.host_temp_size_in_bytes,
    needs.argument_size_in_bytes,
    needs.output_size_in_bytes - needs.alias_size_in_bytes,
    time.monotonic() - begin,
  )


def predict_figures(
  step: cases.StepProgram, host_bytes: int, target: str
) -> PredictedStep:
  """Predicts FLOPs, bytes and time of a step from datasheets."""
  # Bytes for the host leave during the first third of the computation, the
  # forward pass, and return during the rest. A transfer that takes longer than
  # its part of the computation makes the step wait.
  platform = perfmodel.builtin_platform(TARGETS[target])
  backend = "cpu" if target == "cpu" else "cuda"
  cost = perfmodel.predict_cost(step.fn, *step.args, backend=backend)
  compute_s = perfmodel.predict_seconds(cost, platform.device)
  waits = (
    max(0.0, link.transfer_seconds(host_bytes) - share * compute_s)
    for link, share in ((platform.to_host, 1 / 3), (platform.from_host, 2 / 3))
    if link is not None
  )
  step_s = compute_s + (sum(waits) if host_bytes else 0.0)
  return PredictedStep(cost.flops, cost.bytes, step_s, cost.peak_bytes)


def predict_traced(
  traced: Any, step: cases.StepProgram, host_bytes: int, target: str
) -> PredictedStep:
  """Predicts the figures of a step that is traced already."""
  # It is not traced once more: that takes seconds for large steps.
  flat = [
    jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.tree.leaves(step.args)
  ]
  again = cases.StepProgram(jax_core.jaxpr_as_fun(traced.jaxpr), tuple(flat))
  return predict_figures(again, host_bytes, target)


class Measured(NamedTuple):
  """Figures measured on a device, or the reason for having none."""

  # Peak of the bytes in use; None if the device does not say.
  peak_bytes: int | None
  step_ms: float  # Median time of a step, milliseconds.
  reason: str = ""  # Error that ended the measurement; empty if it succeeded.


class Point(NamedTuple):
  """One network at one batch in one mode, with its figures."""

  spec: networks.NetworkSpec  # The network and its batch.
  mode: str  # Name of the mode, a key of `MODES`.
  # Memory of the compiled step, or the compiler's error.
  memory: StepMemory | str
  # Predicted figures; None if the step was not compiled.
  prediction: PredictedStep | None
  # Figures measured on a GPU; None without a GPU.
  measured: Measured | None


def measure_point(spec: networks.NetworkSpec, mode: str, target: str) -> Point:
  """Compiles and predicts a step, and measures it if this machine has a GPU."""
  step = cases.build_step(mode, spec.make_network(), spec.batch)
  try:
    memory = compile_step(step, target)
  except jax.errors.JaxRuntimeError as error:
    return Point(spec, mode, str(error).splitlines()[0], None, None)
  prediction = predict_figures(step, memory.host_temp_bytes, target)
  measured = None
  if has_gpu():
    measured = measure_step(spec.name, dict(spec.options), spec.batch, mode)
  return Point(spec, mode, memory, prediction, measured)


def has_gpu() -> bool:
  """Returns whether this machine has an NVIDIA GPU."""
  return pathlib.Path("/dev/nvidia0").exists()


def measure_step(
  name: str, options: dict[str, Any], batch: int, mode: str, steps: int = 20
) -> Measured:
  """Runs a step in a new process, on the first device that JAX finds there."""
  arguments = json.dumps([name, options, batch, mode, steps])
  environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  if has_gpu():
    # This process may have been restricted to the host, to compile for a GPU.
    environment.pop("JAX_PLATFORMS", None)
  child = subprocess.run(
    [sys.executable, "-m", __name__, arguments],
    env=environment,
    capture_output=True,
    text=True,
  )
  if child.returncode:
    last = child.stderr.strip().splitlines() or [f"exit {child.returncode}"]
    return Measured(None, 0.0, last[-1][:200])
  return Measured(*json.loads(child.stdout.splitlines()[-1]))


def _time_steps(
  name: str, options: dict[str, Any], batch: int, mode: str, steps: int
) -> Measured:
  """Times steps on this process's device, and reads its peak memory."""
  net = models.make_network(name, **options)
  program = cases.build_step(mode, net, batch)
  args = jax.tree.map(_fill_array, program.args)
  step = jax.jit(program.fn, donate_argnums=program.donated)
  times = []
  for i in range(steps + 2):
    begin = time.perf_counter()
    out = jax.block_until_ready(step(*args))
    if i >= 2:
      times.append(time.perf_counter() - begin)
    # Donated arguments are gone: their new values are the first results.
    args = (*out[: len(program.donated)], *args[len(program.donated) :])
    del out
  stats = jax.devices()[0].memory_stats() or {}
  peak = stats.get("peak_bytes_in_use")
  return Measured(peak, 1e3 * statistics.median(times))


def _fill_array(like: Any) -> PyTree:
  """Returns an array of 0.01, or of 0 for labels and tokens."""
  fill = 0.01 if jnp.issubdtype(like.dtype, jnp.floating) else 0
  return jnp.full(like.shape, fill, like.dtype)


MODELS: tuple[str, ...] = ("experiments/models",)
"""Sources that compiled figures of stock policies depend on."""

COSTS: tuple[str, ...] = (*MODELS, "jaxmotion/perfmodel", "jaxmotion/program")
"""Sources that predicted figures of stock policies depend on."""

OURS: tuple[str, ...] = (*MODELS, "jaxmotion")
"""Sources that figures of ours depend on."""


def add_ratios(
  rows: Iterable[records.Row], metrics: Container[str] | None = None
) -> list[records.Row]:
  """Returns rows with baselines and ratios to plain training."""
  rows = list(rows)
  plain = {
    (row.case.rpartition("/")[0], row.metric): row.value
    for row in rows
    if row.case.endswith("/plain") and not isinstance(row.value, str)
  }

  def add_ratio(row: records.Row) -> records.Row:
    baseline = plain.get((row.case.rpartition("/")[0], row.metric))
    if metrics is not None and row.metric not in metrics:
      baseline = None
    if isinstance(row.value, str) or not baseline:
      return row._replace(baseline=None, ratio=None)
    return row._replace(baseline=baseline, ratio=row.value / baseline)

  return [add_ratio(row) for row in rows]


if __name__ == "__main__":
  print(json.dumps(_time_steps(*json.loads(sys.argv[1]))))
