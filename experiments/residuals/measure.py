"""What a step takes: compiled, predicted, and measured where it can be."""

import time
from typing import NamedTuple

import jax

from experiments import gpu_compile
from experiments.residuals.cases import Job
from jaxmotion import perfmodel
from jaxmotion.core import check_choice
from jaxmotion.program import program_memory

# By target: the platform that predictions are for.
TARGETS = {"h100": "h100_node", "h200": "h200_node", "cpu": "ethernet_10gbit"}


class Memory(NamedTuple):
  """What the compiler says that a step takes.

  Attributes:
    machine: that it was compiled for.
    temp_bytes: of everything in between, on the device.
    host_temp_bytes: of everything in between, on the host.
    argument_bytes: of parameters, state and batch.
    result_bytes: of gradients, if any: of what overwrites no argument.
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
    """All that must fit the device."""
    return self.temp_bytes + self.argument_bytes + self.result_bytes


class Prediction(NamedTuple):
  """What a step takes by the performance model.

  Attributes:
    flops: of the step, each operation counted as often as it is done.
    bytes: between memory and processor.
    step_s: seconds of a step.
  """

  flops: float
  bytes: float
  step_s: float


def refusal(target: str) -> str | None:
  """Says why nothing can be compiled for a target here; None if it can."""
  if target == "cpu":
    return None
  gpu_compile.stay_on_the_host()
  return gpu_compile.refusal()


def compile_step(
  job: Job, target: str, memory_gib: float | None = None
) -> Memory:
  """Compiles a step.

  Args:
    job: the step.
    target: of `TARGETS`.
    memory_gib: memory that the compiler is told of; None: what the GPU has.

  Raises:
    ValueError: there is no such target.
  """
  check_choice("target", target, tuple(TARGETS))
  begin = time.monotonic()
  if target == "cpu":
    jitted = jax.jit(job.fn, donate_argnums=job.donated)
    found = program_memory(jitted.lower(*job.args).compile())
    return Memory(
      "CPU: compiled, not run; has no memory of a host beside its own",
      found.temp_bytes,
      found.host_temp_bytes,
      found.argument_bytes,
      found.output_bytes - found.alias_bytes,
      time.monotonic() - begin,
    )
  needs = gpu_compile.memory_for(
    job.fn,
    *job.args,
    gpu=target.upper(),
    memory_gib=memory_gib,
    donate_argnums=job.donated,
  )
  return Memory(
    f"{needs.gpu}, {needs.memory_gib:g} GiB: compiled, not run; without "
    "cuDNN's workspace",
    needs.temp_bytes,
    needs.host_temp_bytes,
    needs.argument_bytes,
    needs.output_bytes - needs.alias_bytes,
    time.monotonic() - begin,
  )


def predict(job: Job, host_bytes: int, target: str) -> Prediction:
  """Predicts a step, from datasheets.

  What goes to the host does so during the first third of the computation, the
  forward pass, and comes back during the rest; what does not fit there is time
  of its own.

  Args:
    job: the step.
    host_bytes: that go to the host and come back.
    target: of `TARGETS`.
  """
  platform = perfmodel.builtin_platform(TARGETS[target])
  backend = "cpu" if target == "cpu" else "cuda"
  cost = perfmodel.predict_cost(job.fn, *job.args, backend=backend)
  compute = perfmodel.predict_seconds(cost, platform.device)
  waits = (
    max(0.0, link.transfer_seconds(host_bytes) - share * compute)
    for link, share in ((platform.to_host, 1 / 3), (platform.from_host, 2 / 3))
  )
  step = compute + (sum(waits) if host_bytes else 0.0)
  return Prediction(cost.flops, cost.bytes, step)
