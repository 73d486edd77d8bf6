"""Memory of a compiled training step, and its predicted FLOPs and time."""

import resource
import time
from typing import Any, NamedTuple

import jax

from experiments import gpu_compile
from experiments.residuals import cases
from jaxmotion import core, perfmodel

TARGETS = {"h100": "h100_node", "h200": "h200_node", "cpu": "ethernet_10gbit"}
"""Platform that predictions are for, by the target that is compiled for."""


class StepMemory(NamedTuple):
  """Memory of a step, as its compiler states it.

  Attributes:
    machine: device that the step was compiled for.
    temp_bytes: temporaries on the device.
    host_temp_bytes: temporaries in host memory.
    argument_bytes: parameters, state and batch.
    result_bytes: results that overwrite no argument, such as gradients.
    compile_s: seconds that the compilation took, on this machine.
  """

  machine: str
  temp_bytes: int
  host_temp_bytes: int
  argument_bytes: int
  result_bytes: int
  compile_s: float

  @property
  def device_bytes(self) -> int:
    """All bytes that the device must hold."""
    return self.temp_bytes + self.argument_bytes + self.result_bytes


class PredictedStep(NamedTuple):
  """Figures of a step by the performance model.

  Attributes:
    flops: FLOPs of the step, recomputed operations included.
    bytes: bytes moved between memory and processor.
    step_s: seconds of a step.
    peak_bytes: most bytes on the device at once.
  """

  flops: float
  bytes: float
  step_s: float
  peak_bytes: float


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


def compile_step(
  step: cases.StepProgram, target: str, memory_gib: float | None = None
) -> StepMemory:
  """Compiles a step and returns its memory."""
  core.check_choice("target", target, tuple(TARGETS))
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
