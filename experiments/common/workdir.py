"""Work folders of jobs: a killed job continues bit for bit."""

import errno
import fcntl
import hashlib
import json
import os
import socket
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from experiments.common import console, records
from experiments.common.checkpoint import CheckpointStore
from experiments.common.console import JobError

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

# Jobs of one process share a lock: they are one program, which has one plan.
_HELD: "weakref.WeakValueDictionary[str, JobLock]" = (
  weakref.WeakValueDictionary()
)


class JobLock:
  """Lock of a folder, held until the object or the process ends."""

  def __init__(self, folder: Path):
    # On one host, two jobs never hold one lock, and the lock of a killed
    # process is free at once. Between hosts the same holds on file systems that
    # share `flock` (NFS 4, Lustre with `-o flock`, GPFS). On others, jobs of
    # two hosts do not see each other's locks, but the second job prints a line.
    self._path = folder / "lock"
    self._file = self._path.open("a+")
    held = self._read_holder()
    here = socket.gethostname()
    try:
      fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise self._refuse(held) from None
    except OSError as error:
      if error.errno not in _UNSUPPORTED:
        raise
      if held.get("host") == here and _is_alive(held.get("process")):
        raise self._refuse(held) from None
    if held and held.get("host") != here:
      console.print_notice(
        f"The lock {self._path} of process {held.get('process')} on host"
        f" {held.get('host')} is taken over. End that process if it lives:"
        " this file system may not share locks between hosts."
      )
    self._file.truncate(0)
    self._file.write(json.dumps({"host": here, "process": os.getpid()}) + "\n")
    self._file.flush()
    self._owner = os.getpid()

  def __del__(self) -> None:
    file = getattr(self, "_file", None)
    if file is None:
      return
    if getattr(self, "_owner", None) == os.getpid():
      file.truncate(0)  # An empty file says that its holder ended well.
    file.close()

  def _read_holder(self) -> dict[str, Any]:
    """Returns host and process that hold or held the lock, if known."""
    try:
      self._file.seek(0)
      held = json.loads(self._file.read())
    except ValueError:
      return {}
    return held if isinstance(held, dict) else {}

  def _refuse(self, held: dict[str, Any]) -> JobError:
    who = (
      f"process {held['process']} on host {held['host']}"
      if held.keys() >= {"process", "host"}
      else "another process"
    )
    return JobError(
      "`workdir` must be a folder that no other job uses, got"
      f" {str(self._path.parent)!r}, which {who} uses. Wait for its end, end"
      " it, or use another folder."
    )


def lock_folder(folder: Path) -> JobLock:
  """Returns the lock of a folder, new or held by this process already."""
  name = str(folder.resolve())
  lock = _HELD.get(name)
  if lock is None:
    lock = _HELD[name] = JobLock(folder)
  return lock


def _is_alive(process: Any) -> bool:
  if not isinstance(process, int):
    return False
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return False
  except PermissionError:
    return True
  return True


# Fields that may change between two starts: a longer list only adds runs.
FREE_FIELDS = ("cases", "exchanges", "seeds", "checkpoint_every")


class Run(NamedTuple):
  """Measurements of one finished training run."""

  exchange: str  # Name of the exchange.
  seed: int  # Seed of the run.
  score: float  # Score on the held-out data, in the task's unit.
  loss: float  # Loss of the last training step.
  # Bytes that one worker sends in one step, by the traced program; with several
  # processes, bytes sent to other processes.
  wire_bytes: int
  compiled_bytes: int  # The same bytes, by the compiled program.
  compile_s: float  # Seconds to trace and compile the step.
  step_ms: float  # Median time of a step, milliseconds.


class Workdir:
  """Folder of one job: its configuration, checkpoints and finished runs.

  One job at a time uses the folder: `job_lock` says what is guaranteed. The
  lock is free when the object is gone. Several processes of a job share the
  folder. Only the first process writes to it, except for checkpoints: each
  process writes those of its own workers.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    config: ConfigDict,
    record: Callable[..., Any] = Run,
    free_fields: Collection[str] = FREE_FIELDS,
    *,
    to_line: Callable[[Any], dict[str, Any]] = lambda run: run._asdict(),
  ):
    # `record` makes a finished run from the fields of its line, and `to_line`
    # returns these fields. `free_fields` may change between two starts.
    self._record, self._to_line = record, to_line
    self._free_fields = free_fields
    self._folder = Path(folder)
    self._runs = self._folder / "runs.jsonl"
    self._is_first = jax.process_index() == 0
    if self._is_first:
      self._make_folder()
      self._claim_folder(config)
    if jax.process_count() > 1:
      # The other processes must see the file that the first one wrote.
      multihost_utils.sync_global_devices(f"{self._folder} is claimed")
      self._find_claim(config)

  def _make_folder(self) -> None:
    """Makes the folder and takes its lock, or says why it cannot."""
    try:
      self._folder.mkdir(parents=True, exist_ok=True)
      self._lock = lock_folder(self._folder)
    except (FileExistsError, NotADirectoryError) as error:
      raise JobError(
        f"`workdir` must be a folder, got {str(self._folder)!r}, where"
        f" {error.filename!r} is a file."
      ) from error
    except OSError as error:
      raise self._refuse_write(error) from error

  def _refuse_write(self, error: OSError) -> JobError:
    return JobError(
      "`workdir` must be a folder that this process can write to, got"
      f" {str(self._folder)!r}: {console.describe_failure(error)}"
    )

  def _claim_folder(self, config: ConfigDict) -> None:
    """Writes the configuration, or checks that it is the same."""
    fields = json.loads(config.to_json())
    ours = {k: v for k, v in fields.items() if k not in self._free_fields}
    path = self._folder / "config.json"
    if not path.exists():
      if self._runs.exists() or (self._folder / "checkpoints").exists():
        raise JobError(
          "`workdir` must be empty or have the config.json of its runs, got"
          f" {str(self._folder)!r}, which has runs only. Use another folder."
        )
      self._write_lines(path, [ours])
      return
    found = read_sealed(path)
    theirs = found[0] if len(found) == 1 else None
    if theirs is None:
      raise JobError(
        "`workdir` must be empty or have a whole config.json, got"
        f" {str(path)!r}, which is cut or changed. Use another folder."
      )
    changed = sorted(k for k in ours | theirs if ours.get(k) != theirs.get(k))
    if changed:
      raise JobError(
        "`workdir` must be empty or belong to this configuration, got"
        f" {str(self._folder)!r}, which differs in {', '.join(changed)}."
      )

  def _find_claim(self, config: ConfigDict) -> None:
    if not (self._folder / "config.json").exists():
      raise JobError(
        "`workdir` must be a folder that all processes share, got"
        f" {str(self._folder)!r}, where process {jax.process_index()} does not"
        " find what process 0 has written."
      )
    self._claim_folder(config)

  def read_runs(self) -> list[Any]:
    """Returns the finished runs, in the order they finished."""
    # A run whose line is broken is left out: it is read from its last
    # checkpoint again.
    found = read_sealed(self._runs)
    if self._is_first:
      for number, line in enumerate(found, 1):
        if line is None:
          console.print_notice(
            f"Line {number} of {self._runs} is cut or changed: its run is"
            " repeated from its last checkpoint."
          )
    return [self._record(**line) for line in found if line is not None]

  def add_run(self, run: Any) -> None:
    """Records that a run is finished, so that it is not repeated."""
    if not self._is_first:
      return
    runs = [*self.read_runs(), run]
    self._write_lines(self._runs, [self._to_line(r) for r in runs])

  def open_store(self, case: str, seed: int) -> CheckpointStore:
    """Returns the checkpoints of one run."""
    return CheckpointStore(self._folder / "checkpoints" / f"{case}-seed{seed}")

  def _write_lines(self, path: Path, lines: list[dict]) -> None:
    try:
      write_sealed(path, lines)
    except OSError as error:
      raise self._refuse_write(error) from error


def write_sealed(path: Path, lines: list[dict]) -> None:
  """Writes one JSON object a line, each with its digest."""
  sealed = ({"digest": _digest(line), "line": line} for line in lines)
  records.write_lines(path, sealed)


def _digest(line: Any) -> str:
  text = json.dumps(line, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def read_sealed(path: Path) -> list[Any]:
  """Returns the lines of a file, None for each that is not as written."""
  if not path.exists():
    return []
  found = []
  for text in path.read_bytes().splitlines():
    try:
      sealed = json.loads(text)
      line = sealed["line"]
      is_whole = sealed["digest"] == _digest(line)
    except (ValueError, KeyError, TypeError):
      is_whole = False
    found.append(line if is_whole else None)
  return found
