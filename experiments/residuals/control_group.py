"""Limits the memory of this process by a control group of Linux."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

_ROOT = pathlib.Path("/sys/fs/cgroup")


class _Files(NamedTuple):
  """Folder of groups, and the files of one group."""

  folder: pathlib.Path
  limit: str
  swap: str  # Limit of memory and swap, or of swap alone.
  peak: str


_V1 = _Files(
  _ROOT / "memory",
  "memory.limit_in_bytes",
  "memory.memsw.limit_in_bytes",
  "memory.max_usage_in_bytes",
)
_V2 = _Files(_ROOT, "memory.max", "memory.swap.max", "memory.peak")


def explain_refusal() -> str | None:
  """Returns the reason why memory cannot be limited; None if it can."""
  files = _find_files()
  if not os.access(files.folder, os.W_OK):
    return f"{files.folder} cannot be written to (Linux, and root)"
  if files is _V2:
    enabled = (_ROOT / "cgroup.subtree_control").read_text().split()
    if "memory" not in enabled:
      return "the groups of this machine do not limit memory"
  return None


class Group(NamedTuple):
  """A control group that this process is in."""

  folder: pathlib.Path
  peak: str  # Name of a file.

  def read_peak(self) -> int:
    """Returns the most bytes that the group has held."""
    return int((self.folder / self.peak).read_text())


@contextlib.contextmanager
def limit_memory(nbytes: int) -> Iterator[Group]:
  """Kills this process if it takes more memory than it has already."""
  # Pages that the process has already are not counted.
  files = _find_files()
  before = _find_group(files)
  group = Group(_find_folder(f"{os.getpid()}"), files.peak)
  group.folder.mkdir()
  try:
    (group.folder / files.limit).write_text(f"{nbytes}")
    if (group.folder / files.swap).exists():
      swap = 0 if files is _V2 else nbytes
      (group.folder / files.swap).write_text(f"{swap}")
    (group.folder / "cgroup.procs").write_text(f"{os.getpid()}")
    yield group
  finally:
    (before / "cgroup.procs").write_text(f"{os.getpid()}")
    group.folder.rmdir()


def remove_group(process_id: str) -> None:
  """Removes the group of a process that was killed."""
  with contextlib.suppress(FileNotFoundError):
    _find_folder(process_id).rmdir()


def _find_folder(process_id: str) -> pathlib.Path:
  return _find_files().folder / f"jaxmotion-{process_id}"


def _find_files() -> _Files:
  return _V1 if _V1.folder.is_dir() else _V2


def _find_group(files: _Files) -> pathlib.Path:
  """Returns the folder of the group that this process is in."""
  for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
    _, controllers, path = line.split(":", 2)
    if controllers == ("memory" if files is _V1 else ""):
      found = files.folder / path.lstrip("/")
      return found if found.is_dir() else files.folder
  return files.folder
