"""Jobs that tests start as processes, and the comparison of their results."""

import subprocess
import sys

import jax
import numpy as np

from experiments.fuzz import fault_jobs
from tests.paths import ROOT
from tests.processes import WAIT, environment

_FIELDS = (
  *("channels", "hidden", "exchanges", "seeds", "workers", "steps"),
  *("batch_size", "warmup_steps", "checkpoint_every", "data", "data_dir"),
)


def command(config, *flags):
  """The command line that makes `configs/digits.py` equal `config`."""
  fields = [f"--config.{name}={config[name]}" for name in _FIELDS]
  program = [sys.executable, "-m", "experiments.train"]
  return [*program, "--config=configs/digits.py", *fields, *flags]


def run_module(module, *flags):
  """Runs a command of the experiments to its end."""
  return subprocess.run(
    [sys.executable, "-m", f"experiments.{module}", *flags],
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=WAIT,
  )


def save_images(path):
  """Writes few small images of ten classes, which load faster than digits."""
  fault_jobs.save_images(path)
  return {"data": "cifar10", "data_dir": str(path)}


def assert_same_bits(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
