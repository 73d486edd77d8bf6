"""Small training jobs as forked processes, which start in a second.

The process that forks has imported JAX, but must not have started it.
"""

import ctypes
import hashlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from experiments.common import checkpoint, distributed, shared_flags
from experiments.common.checkpoint import BrokenFileError
from experiments.common.workdir import Run, read_sealed
from experiments.hosts.processes import find_free_port

_ROOT = Path(__file__).parents[2]
_POLL_S = 0.002
_PR_SET_PDEATHSIG = 1
_KEEP_S = 300  # No job takes longer.

STEPS = 120
"""Steps of a job."""

CHECKPOINT_EVERY = 4
"""Steps between two checkpoints of a job."""


class Ended(NamedTuple):
  """The end of one process of a job."""

  code: int  # Exit code, negative for a signal.
  said: str  # Text on its standard error.


class Outcome(NamedTuple):
  """State of a run, as its checkpoint has it."""

  losses: list[float]  # Loss of each step so far.
  digest: str  # Digest over all leaves.
  runs: list[Run]  # Finished runs, without their times.


class Job:
  """Processes that train together, and the files of what they say."""

  def __init__(self, starts: Sequence[Callable[[], None]], folder: Path):
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

  def wait_until(self, is_ready: Callable[[], bool]) -> bool:
    """Waits for a condition; returns False if the job ends before."""
    deadline = time.monotonic() + _KEEP_S
    while not is_ready():
      if self.wait(0.0) or time.monotonic() > deadline:
        return False
      time.sleep(_POLL_S / 2)
    return True

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
  """Starts jobs of one small configuration."""

  def __init__(
    self,
    folder: Path,
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
    save_images(self._images)

  def start(
    self,
    workdir: Path,
    flags: Sequence[str] = (),
    is_cached: bool = True,
    prepare: Callable[[], None] = lambda: None,
  ) -> Job:
    """Starts the processes of a job."""
    self._started += 1
    port = find_free_port()

    def make_start(index: int) -> Callable[[], None]:
      several: list[str] = []
      if self.processes > 1:
        address = f"127.0.0.1:{port}"
        several = distributed.member_flags(address, self.processes, index)

      def start() -> None:
        jax.config.update("jax_enable_compilation_cache", is_cached)
        prepare()
        self._train([*self.arguments(workdir), *several, *flags])

      return start

    starts = [make_start(index) for index in range(self.processes)]
    return Job(starts, self.folder / f"output-{self._started}")

  def run_straight(self) -> Outcome:
    """Returns the end of a job that nothing interrupts."""
    self.start(self.folder / "straight").finish()
    return read_outcome(self.folder / "straight")

  def arguments(self, workdir: Path) -> list[str]:
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
    """Runs the training command in this process, which a fork has made."""
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


def list_checkpoints(workdir: Path) -> list[Path]:
  """Returns the folders of the checkpoints, latest last."""
  folders = [p for p in workdir.glob("checkpoints/*/*") if p.name.isdigit()]
  return sorted(folders, key=lambda path: int(path.name))


def find_step(workdir: Path) -> int:
  """Returns the step of the latest checkpoint, 0 if there is none."""
  return max((int(path.name) for path in list_checkpoints(workdir)), default=0)


def read_outcome(workdir: Path) -> Outcome:
  """Returns the state of the one run in a work folder."""
  runs = [
    Run(**line)._replace(compile_s=0.0, step_ms=0.0) if line else None
    for line in read_sealed(workdir / "runs.jsonl")
  ]
  if None in runs:
    raise BrokenFileError("runs.jsonl has a broken line")
  folders = list_checkpoints(workdir)
  if not folders:
    return Outcome([], "", [run for run in runs if run])
  latest = folders[-1]
  checkpoint.check_manifest(latest)
  with tempfile.TemporaryDirectory() as folder:
    # In a process of its own, because orbax starts JAX.
    job = Job([lambda: print(_hash_arrays(latest))], Path(folder))
    (ended,) = job.finish()
    if ended.code:
      raise RuntimeError(f"{latest} cannot be read: {ended.said}")
    digest = Path(folder, "stdout-0").read_text().strip()
  losses = checkpoint.read_log(latest).loss
  return Outcome(losses, digest, [run for run in runs if run])


def _hash_arrays(path: Path) -> str:
  """Returns a digest of the bits of all arrays of a checkpoint."""
  jax.config.update("jax_platforms", "cpu")
  digest = hashlib.sha256()
  for name, array in sorted(checkpoint.read_arrays(path).items()):
    digest.update(f"{name} {array.dtype} {array.shape}".encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def _fork(start: Callable[[], None], output: Path, errors: Path) -> int:
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


def save_images(path: Path) -> None:
  """Writes few small images of ten classes, which load faster than digits."""
  random = np.random.default_rng(0)
  arrays: dict[str, np.ndarray] = {}
  for split, count in (("train", 64), ("test", 32)):
    pixels = random.integers(0, 256, (count, 8, 8, 1))
    arrays[f"x_{split}"] = pixels.astype(np.uint8)
    arrays[f"y_{split}"] = random.integers(0, 10, count)
  np.savez(path, allow_pickle=False, **arrays)
