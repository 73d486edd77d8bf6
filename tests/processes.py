"""Environment and patience of the processes that tests start."""

import os
import socket
import subprocess

from tests import compile_fast
from tests.paths import ROOT

# Seconds that a busy machine may take. Less than the limit of a test in the
# Makefile, so that a job that hangs ends one test and not the run.
WAIT = 240


def environment(cache=True):
  """The environment of a job, which may share compiled programs."""
  # Of several processes only the first one uses these programs, and the others
  # keep it waiting while they compile.
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


def free_address():
  """An address of this machine that no process listens on."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{probe.getsockname()[1]}"


def run_together(commands, **options):
  """Runs commands at once; returns what each one printed, and exit codes."""
  processes = [
    subprocess.Popen(own, stdout=subprocess.PIPE, text=True, **options)
    for own in commands
  ]
  try:
    said = [p.communicate(timeout=WAIT)[0] for p in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  return said, [process.returncode for process in processes]
