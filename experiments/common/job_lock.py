"""Locks of work folders: one job at a time.

What is guaranteed: on one host, two jobs never hold one lock, and the lock of a
killed process is free at once. Between hosts the same holds on file systems
that share `flock` (NFS 4, Lustre with `-o flock`, GPFS). On others, jobs of two
hosts do not see each other's locks, but the second job prints a line.
"""

import errno
import fcntl
import json
import os
import pathlib
import socket
import weakref
from typing import Any

from experiments.common import console

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

# Jobs of one process share a lock: they are one program, which has one plan.
_HELD: "weakref.WeakValueDictionary[str, JobLock]" = (
  weakref.WeakValueDictionary()
)


class JobLock:
  """Lock of a folder, held until the object or the process ends.

  Args:
    folder: folder that exists.

  Raises:
    JobError: another process holds the lock; the message names it.
    OSError: the system refuses the file of the lock.
  """

  def __init__(self, folder: pathlib.Path):
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

  def _refuse(self, held: dict[str, Any]) -> console.JobError:
    who = (
      f"process {held['process']} on host {held['host']}"
      if held.keys() >= {"process", "host"}
      else "another process"
    )
    return console.JobError(
      "`workdir` must be a folder that no other job uses, got"
      f" {str(self._path.parent)!r}, which {who} uses. Wait for its end, end"
      " it, or use another folder."
    )


def lock_folder(folder: pathlib.Path) -> JobLock:
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
