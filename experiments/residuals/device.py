"""Peak memory and time of a training step on a real GPU.

Each step runs in a process of its own, because a device remembers only the peak
of its whole process.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments import models
from experiments.residuals import cases
from jaxmotion.core import PyTree


class Measured(NamedTuple):
  """Figures measured on a device, or the reason for having none.

  Attributes:
    peak_bytes: peak of the bytes in use; None if the device does not say.
    step_ms: median time of a step, milliseconds.
    reason: error that ended the measurement; empty if it succeeded.
  """

  peak_bytes: int | None
  step_ms: float
  reason: str = ""


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


if __name__ == "__main__":
  print(json.dumps(_time_steps(*json.loads(sys.argv[1]))))
