"""A step on a real GPU: the most bytes in use, and its time.

A process of its own for each step, since a device remembers only the most bytes
that were ever in use.
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
  """What was measured, or why nothing was.

  Attributes:
    peak_bytes: most that were in use; None if the device does not say.
    step_ms: median of a step.
    reason: why there is nothing else; empty if there is.
  """

  peak_bytes: int | None
  step_ms: float
  reason: str = ""


def there_is_one() -> bool:
  """Whether this machine has an NVIDIA GPU."""
  return pathlib.Path("/dev/nvidia0").exists()


def measure(
  name: str, options: dict[str, Any], batch: int, mode: str, steps: int = 20
) -> Measured:
  """Runs a step in a fresh process, on the first device that JAX finds there.

  Args:
    name: of the network.
    options: of the network.
    batch: examples.
    mode: of `MODES`.
    steps: that are timed.
  """
  what = json.dumps([name, options, batch, mode, steps])
  environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
  if there_is_one():  # This process may have been told to stay on the host.
    environment.pop("JAX_PLATFORMS", None)
  child = subprocess.run(
    [sys.executable, "-m", __name__, what],
    env=environment,
    capture_output=True,
    text=True,
  )
  if child.returncode:
    last = child.stderr.strip().splitlines() or [f"exit {child.returncode}"]
    return Measured(None, 0.0, last[-1][:200])
  return Measured(*json.loads(child.stdout.splitlines()[-1]))


def _run(
  name: str, options: dict[str, Any], batch: int, mode: str, steps: int
) -> Measured:
  net = models.make_network(name, **options)
  job = cases.job(mode, net, batch)
  args = jax.tree.map(_some, job.args)
  step = jax.jit(job.fn, donate_argnums=job.donated)
  times = []
  for i in range(steps + 2):
    begin = time.perf_counter()
    out = jax.block_until_ready(step(*args))
    if i >= 2:
      times.append(time.perf_counter() - begin)
    # What was donated is in the results, in the same places.
    args = (*out[: len(job.donated)], *args[len(job.donated) :])
    del out
  stats = jax.devices()[0].memory_stats() or {}
  peak = stats.get("peak_bytes_in_use")
  return Measured(peak, 1e3 * statistics.median(times))


def _some(like: Any) -> PyTree:
  """Small values; zero is a class or a token."""
  fill = 0.01 if jnp.issubdtype(like.dtype, jnp.floating) else 0
  return jnp.full(like.shape, fill, like.dtype)


if __name__ == "__main__":
  print(json.dumps(_run(*json.loads(sys.argv[1]))))
