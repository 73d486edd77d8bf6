"""Small training jobs as forked processes, which start in a second.

The process that forks has imported JAX, but must not have started it.
"""

import ctypes
import hashlib
import os
import pathlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from experiments.common import checkpoint, manifest, shared_flags
from experiments.common.workdir import Run, read_sealed
from experiments.hosts.processes import find_free_port

_ROOT = pathlib.Path(__file__).parents[2]
_POLL_S = 0.002
_PR_SET_PDEATHSIG = 1
_KEEP_S = 300  # No job takes longer.

STEPS = 120
"""Steps of a job."""

CHECKPOINT_EVERY = 4
"""Steps between two checkpoints of a job."""


class Ended(NamedTuple):
  """The end of one process of a job.

  Attributes:
    code: exit code, negative for a signal.
    said: text on its standard error.
  """

  code: int
  said: str


class Outcome(NamedTuple):
  """State of a run, as its checkpoint has it.

  Attributes:
    losses: loss of each step so far.
    digest: digest over all leaves.
    runs: finished runs, without their times.
  """

  losses: list[float]
  digest: str
  runs: list[Run]


class Job:
  """Processes that train together, and the files of what they say.

  Args:
    starts: a function for each process, which does not return.
    folder: folder of the files.
  """

  def __init__(
    self, starts: Sequence[Callable[[], None]], folder: pathlib.Path
  ):
    folder.mkdir(parents=True, exist_ok=True)
    self._errors = [folder / f"stderr-{i}" for i in range(len(starts))]
    self._codes: dict[int, int] = {}
    self.pids = [
      _fork(start, folder / f"stdout-{i}", self._errors[i])
      for i, start in enumerate(starts)
    ]

  def send(self, index: int, number: int) -> None:
    """Sends a signal to one process, if it lives."""
    if index not in self._codes:
      os.kill(self.pids[index], number)

  def wait(self, seconds: float) -> list[Ended] | None:
    """Waits until all processes have ended; None if one has not in time."""
    deadline = time.monotonic() + seconds
    while True:
      for index, pid in enumerate(self.pids):
        if index not in self._codes:
          ended, status = os.waitpid(pid, os.WNOHANG)
          if ended:
            self._codes[index] = os.waitstatus_to_exitcode(status)
      if len(self._codes) == len(self.pids):
        return [
          Ended(self._codes[i], path.read_text(errors="replace"))
          for i, path in enumerate(self._errors)
        ]
      if time.monotonic() > deadline:
        return None
      time.sleep(_POLL_S)

  def has_ended(self, index: int) -> bool:
    """Returns whether a process had ended at the last call of `wait`."""
    return index in self._codes

  def finish(self) -> list[Ended]:
    """Waits for the end of the job, and kills it if it takes too long."""
    ended = self.wait(_KEEP_S)
    return self.kill() if ended is None else ended

  def kill(self) -> list[Ended]:
    """Kills the processes that live and waits for their end."""
    for index in range(len(self.pids)):
      self.send(index, signal.SIGKILL)
    ended = self.wait(_KEEP_S)
    assert ended is not None
    return ended


class Rig:
  """Starts jobs of one small configuration.

  Args:
    folder: folder for data, compiled programs and output.
    processes: processes of a job.
    steps: steps of a job.
    workers: workers of a job, or None: one a process, and at least two.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    processes: int = 1,
    steps: int = STEPS,
    workers: int | None = None,
  ):
    # Before the first fork, so that jobs do not import it again.
    from experiments.train import __main__ as train  # Defines flags.

    self._main = train.main
    self.folder = folder
    self.processes = processes
    self.steps = steps
    self._workers = workers or max(2, processes)
    self._cache = os.environ.get(
      "JAX_COMPILATION_CACHE_DIR", str(folder / "cache")
    )
    self._images = folder / "images.npz"
    self._started = 0
    folder.mkdir(parents=True, exist_ok=True)
    _save_images(self._images)

  def start(
    self,
    workdir: pathlib.Path,
    flags: Sequence[str] = (),
    is_cached: bool = True,
    prepare: Callable[[], None] = lambda: None,
  ) -> Job:
    """Starts the processes of a job."""
    self._started += 1
    port = find_free_port()

    def make_start(index: int) -> Callable[[], None]:
      members = [
        f"--coordinator_address=127.0.0.1:{port}",
        f"--num_processes={self.processes}",
        f"--process_id={index}",
      ]
      several = members if self.processes > 1 else []

      def start() -> None:
        jax.config.update("jax_enable_compilation_cache", is_cached)
        prepare()
        self._train([*self.arguments(workdir), *several, *flags])

      return start

    starts = [make_start(index) for index in range(self.processes)]
    return Job(starts, self.folder / f"output-{self._started}")

  def arguments(self, workdir: pathlib.Path) -> list[str]:
    """Returns the flags of a job of one process."""
    fields = {
      "channels": (4, 4),
      "hidden": 8,
      "exchanges": ("sign_feedback",),
      "seeds": (0,),
      "workers": self._workers,
      "steps": self.steps,
      "batch_size": 8,
      "warmup_steps": 1,
      "checkpoint_every": CHECKPOINT_EVERY,
      "data": "cifar10",
      "data_dir": str(self._images),
    }
    config = [f"--config.{name}={value}" for name, value in fields.items()]
    path = _ROOT / "configs" / "digits.py"
    return [f"--config={path}", *config, f"--workdir={workdir}"]

  def _train(self, arguments: list[str]) -> None:
    # The emulated devices of this process are not those of the job.
    given = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in given if "_device_count=" not in flag]
    os.environ["XLA_FLAGS"] = " ".join(kept)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", self._cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    # Without the rows of this command, whose flags a fork has.
    sys.argv = ["experiments.train", "--json=", *arguments]
    shared_flags.run_main(self._main)


def read_outcome(workdir: pathlib.Path) -> Outcome:
  """Returns the state of the one run in a work folder."""
  runs = [
    Run(**line)._replace(compile_s=0.0, step_ms=0.0) if line else None
    for line in read_sealed(workdir / "runs.jsonl")
  ]
  if None in runs:
    raise manifest.BrokenFileError("runs.jsonl has a broken line")
  folders = [p for p in workdir.glob("checkpoints/*/*") if p.name.isdigit()]
  if not folders:
    return Outcome([], "", [run for run in runs if run])
  latest = max(folders, key=lambda path: int(path.name))
  manifest.check_manifest(latest)
  with tempfile.TemporaryDirectory() as folder:
    # In a process of its own, because orbax starts JAX.
    job = Job([lambda: print(_hash_arrays(latest))], pathlib.Path(folder))
    (ended,) = job.finish()
    if ended.code:
      raise RuntimeError(f"{latest} cannot be read: {ended.said}")
    digest = pathlib.Path(folder, "stdout-0").read_text().strip()
  losses = checkpoint.read_log(latest).loss
  return Outcome(losses, digest, [run for run in runs if run])


def _hash_arrays(path: pathlib.Path) -> str:
  """Returns a digest of the bits of all arrays of a checkpoint."""
  jax.config.update("jax_platforms", "cpu")
  digest = hashlib.sha256()
  for name, array in sorted(checkpoint.read_arrays(path).items()):
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def _fork(
  start: Callable[[], None], output: pathlib.Path, errors: pathlib.Path
) -> int:
  """Returns the process id of a process that runs a function and ends."""
  sys.stdout.flush()
  sys.stderr.flush()
  pid = os.fork()
  if pid:
    return pid
  code = 70
  try:
    # A job does not outlive the command, however that ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A shell lets commands in the background ignore it, and so their jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in ((1, output), (2, errors)):
      descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
      os.dup2(descriptor, number)
      os.close(descriptor)
    start()
    code = 0
  except SystemExit as end:
    code = end.code if isinstance(end.code, int) else bool(end.code)
    if isinstance(end.code, str):
      print(end.code, file=sys.stderr)
  except BaseException:
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _save_images(path: pathlib.Path) -> None:
  """Writes few small images of ten classes."""
  random = np.random.default_rng(0)
  arrays: dict[str, np.ndarray] = {}
  for split, count in (("train", 64), ("test", 32)):
    pixels = random.integers(0, 256, (count, 8, 8, 1))
    arrays[f"x_{split}"] = pixels.astype(np.uint8)
    arrays[f"y_{split}"] = random.integers(0, 10, count)
  np.savez(path, allow_pickle=False, **arrays)
