"""Jobs of `experiments.train` that tests start as processes."""

import os
import subprocess
import sys

import numpy as np

from tests import compile_fast
from tests.paths import ROOT

# Seconds that a busy machine may take. Less than the limit of a test in the
# Makefile, so that a job that hangs ends one test and not the run.
WAIT = 240

_FIELDS = (
  *("channels", "hidden", "exchanges", "seeds", "workers", "steps"),
  *("batch_size", "warmup_steps", "checkpoint_every", "data", "data_dir"),
)


def command(config, *flags):
  """The command line that makes `configs/digits.py` equal `config`."""
  fields = [f"--config.{name}={config[name]}" for name in _FIELDS]
  program = [sys.executable, "-m", "experiments.train"]
  return [*program, "--config=configs/digits.py", *fields, *flags]


def environment(cache=True):
  """The environment of a job.

  Args:
    cache: whether jobs share compiled programs. Of several processes only the
      first one uses them, and the others keep it waiting while they compile.
  """
  # The emulated devices of this test process are not those of the job.
  kept = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  kept["JAX_PLATFORMS"] = "cpu"
  # As in the folders of tests/conftest.py: some tests compare bits.
  kept["XLA_FLAGS"] = compile_fast.flags()
  kept["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
  if cache:
    folder = ROOT / ".pytest_cache" / "d" / "jobs"
    kept["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    kept["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
  return kept


def run(config, *flags):
  return subprocess.run(
    command(config, *flags),
    cwd=ROOT,
    env=environment(),
    capture_output=True,
    text=True,
    timeout=WAIT,
  )


def save_images(path):
  """Writes few small images of ten classes, which load faster than digits."""
  random = np.random.default_rng(0)
  arrays = {}
  for split, count in (("train", 64), ("test", 32)):
    shape = (count, 8, 8, 1)
    arrays[f"x_{split}"] = random.integers(0, 256, shape).astype(np.uint8)
    arrays[f"y_{split}"] = random.integers(0, 10, count)
  np.savez(path, **arrays)
  return {"data": "cifar10", "data_dir": str(path)}


def latest_step(folder):
  """The last step that has a checkpoint in a work folder, 0 without any."""
  names = [path.name for path in folder.glob("checkpoints/*/*")]
  return max((int(name) for name in names if name.isdigit()), default=0)
