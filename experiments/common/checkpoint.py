"""Checkpoints of one run: orbax writes them, a manifest covers every byte.

The folder of a run has one folder for each checkpoint, named by its number of
steps. The folder gets its name when all processes have written their files and
the disk has them, so a killed job leaves no incomplete checkpoint. The last two
checkpoints are kept: if the last is broken, the one before it is used.

Orbax alone does not do all of this. It restored wrong values without an error
after 36 of 60 flipped bits. Before its own rename it waits for the disk with
files of arrays alone. It refuses arrays of size 0, which are left out here.
`CheckpointManager` would add threads, and deletes old checkpoints before it
knows that the new one can be read. So names, order and checksums are kept here.

Orbax waits for other processes in collectives, as the steps do: the death of a
process is noticed at once. Its files hold numbers and JSON, and run no code. A
save of the digits job takes 0.3 s (one file with its checksum took 0.06 s), and
leaves some 35 KiB in memory, half of them where TensorStore counts bytes.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from experiments.common import console
from experiments.common.console import JobError

NAME = "SHA256SUMS"
"""Name of the manifest in its folder."""

_THREADS = 16


class BrokenFileError(Exception):
  """A file that is missing, cut or changed; the message names the file."""


# A manifest is what `sha256sum` writes, so that `sha256sum --check` reads it.
# Its last line is a comment with the checksum of the lines before. A file that
# is missing, cut or changed no longer matches, nor does a file that was added,
# nor a folder with another name.
def write_manifest(folder: Path, name: str) -> None:
  """Writes the checksums of a folder and waits until the disk has its files."""
  paths = _list_files(folder)
  # The disk takes many files at once in the time of a few.
  with ThreadPoolExecutor(_THREADS) as pool:
    digests = pool.map(lambda path: _hash_file(folder / path, True), paths)
    pairs = zip(digests, paths, strict=True)
    text = "".join(f"{digest}  {name}/{path}\n" for digest, path in pairs)
    folders = [Path(parent) for parent, _, _ in os.walk(folder)]
    list(pool.map(sync_folder, folders))
  body = text.encode()
  with (folder / NAME).open("wb") as file:
    file.write(body + _make_seal(body))
    file.flush()
    os.fsync(file.fileno())
  sync_folder(folder)


def check_manifest(folder: Path) -> dict[str, str]:
  """Checks that a folder has the files of its manifest and no others."""
  wanted = _read_manifest(folder)
  found = set(_list_files(folder))
  for path in sorted(found | set(wanted)):
    if path not in wanted:
      raise BrokenFileError(f"{path} is not in {NAME}")
    if path not in found:
      raise BrokenFileError(f"{path} is missing")
    try:
      digest = _hash_file(folder / path)
    except OSError as error:
      raise BrokenFileError(f"{path}: {error.strerror}") from error
    if not _is_same(digest, wanted[path]):
      raise BrokenFileError(f"{path} does not match its checksum")
  return wanted


def sync_folder(folder: Path) -> None:
  """Waits until the disk has the names in a folder."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  except OSError:
    pass  # Some file systems cannot, and keep names in order by themselves.
  finally:
    os.close(descriptor)


def remove_folder(folder: Path) -> None:
  """Removes a folder and its files, as far as the system lets it."""
  with ThreadPoolExecutor(_THREADS) as pool:
    for path in _list_files(folder):
      pool.submit(os.unlink, folder / path)  # `rmtree` tries again.
  shutil.rmtree(folder, ignore_errors=True)


def _read_manifest(folder: Path) -> dict[str, str]:
  try:
    data = (folder / NAME).read_bytes()
  except OSError as error:
    raise BrokenFileError(f"{NAME}: {error.strerror}") from error
  body = data[: -len(_make_seal(b""))]
  if not _is_same(data, body + _make_seal(body)):
    raise BrokenFileError(f"{NAME} does not match its checksum")
  sums = {}
  for line in body.decode(errors="replace").splitlines():
    digest, _, name = line.partition("  ")
    parent, _, path = name.partition("/")
    if parent != folder.name:
      raise BrokenFileError(f"{NAME} is of another checkpoint")
    sums[path] = digest
  return sums


def _make_seal(body: bytes) -> bytes:
  """Returns the last line of a manifest, of the same length for any body."""
  return f"# {hashlib.sha256(body).hexdigest()}\n".encode()


def _is_same(found: str | bytes, wanted: str | bytes) -> bool:
  return found == wanted


def _list_files(folder: Path) -> list[str]:
  """Returns the paths of all files but the manifest."""
  paths = [
    Path(parent, name).relative_to(folder).as_posix()
    for parent, _, names in os.walk(folder)
    for name in names
  ]
  return sorted(path for path in paths if path != NAME)


def _hash_file(path: Path, is_new: bool = False) -> str:
  """Returns the checksum of a file; of a new one, when the disk has it."""
  with path.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256")
    if is_new:
      os.fsync(file.fileno())
  return digest.hexdigest()


_STATE, _FACTS = "state", "facts"  # Folders of a checkpoint.
_KEPT = 2  # Checkpoints of a run.
_JOIN_S = 5.0
_SYSTEM_ERROR = re.compile(r"os_error_code='(\d+)'")


class Log(NamedTuple):
  """Losses and times of a run so far, step by step."""

  loss: list[float]  # Loss of each step.
  step_ms: list[float]  # Time of each step, milliseconds.


class Elastic(NamedTuple):
  """Continuation of a saved state by other workers."""

  layout: Any  # Description of the state, plain data that is saved beside it.
  # Returns arrays like the state of another layout, on the devices of this job.
  like_saved: Callable[[Any], Any]
  # Returns the state of this job, from a state and its layout.
  resize: Callable[[Any, Any], Any]


class CheckpointStore:
  """Checkpoints of one run: parameters, optimizer state, log.

  The leaves are saved by their number in the tree, so that no name inside an
  optimizer state (or inside a codec's error memory) becomes part of the format.
  """

  def __init__(self, folder: Path):
    self._folder = folder
    self._is_first = jax.process_index() == 0
    with _mute_logs():
      handlers = {
        _STATE: ocp.StandardCheckpointHandler(),
        _FACTS: ocp.JsonCheckpointHandler(),
      }
      handler = ocp.CompositeCheckpointHandler(**handlers)
      self._orbax = ocp.Checkpointer(handler)

  def save(self, tree: Any, log: Log, layout: Any = None) -> None:
    """Writes the state after `len(log.loss)` steps and waits for the disk."""
    step = len(log.loss)
    try:
      self._write_step(step, tree, log, layout)
    except OSError as error:
      raise JobError(
        f"the checkpoint of step {step} cannot be written to"
        f" {str(self._folder)!r}: {console.describe_failure(error)}"
      ) from error

  def restore(
    self, like: Any, elastic: Elastic | None = None
  ) -> tuple[Any, Log]:
    """Reads the latest checkpoint that is as it was written."""
    # A checkpoint that is not is moved aside, and a line says so.
    # Returns the saved tree and log; `like` and an empty log if nothing is
    # saved.
    step = _agree_on(self._find_latest() if self._is_first else 0)
    if not step:
      return like, Log([], [])
    path = self._folder / str(step)
    if not self._is_first:
      try:
        check_manifest(path)
      except BrokenFileError as error:
        raise JobError(
          f"process 0 alone can read step {step}: {error}"
        ) from error
    facts = self._load(path, {_FACTS: ocp.args.JsonRestore()})[_FACTS]
    layout = facts["layout"]
    # JSON gives lists for tuples.
    if elastic and layout in (None, json.loads(json.dumps(elastic.layout))):
      elastic = None  # Nothing has changed.
    if elastic:
      like = elastic.like_saved(layout)
    leaves, structure = jax.tree.flatten(like)
    self._check_leaves(step, facts["leaves"], leaves)
    arrays = _select_saved(leaves)
    if arrays:
      args = {_STATE: ocp.args.StandardRestore(arrays)}
      arrays = self._load(path, args)[_STATE]
    restored = [
      arrays[str(i)] if str(i) in arrays else _make_empty(x)
      for i, x in enumerate(leaves)
    ]
    tree = jax.tree.unflatten(structure, restored)
    if elastic:
      tree = elastic.resize(tree, layout)
    if self._is_first:
      console.print_notice(f"{self._folder.name}: resumed from step {step}.")
    return tree, Log(**facts["log"])

  def list_steps(self) -> list[int]:
    """Returns the steps that have a checkpoint, latest first."""
    if not self._folder.is_dir():
      return []
    names = [path.name for path in self._folder.iterdir()]
    return sorted((int(n) for n in names if n.isdigit()), reverse=True)

  def _write_step(self, step: int, tree: Any, log: Log, layout: Any) -> None:
    """Writes a checkpoint under a name of its own, then renames it."""
    # A process of an earlier job may still live: its token is another one.
    token = _agree_on(secrets.randbits(31))
    partial = self._folder / f"{step}.partial-{token}"
    if self._is_first:
      self._remove_leftovers()
      self._folder.mkdir(parents=True, exist_ok=True)
    leaves = jax.tree.leaves(tree)
    facts = {
      "leaves": [_describe_leaf(x) for x in leaves],
      "layout": layout,
      "log": log._asdict(),
    }
    items: dict[str, Any] = {_FACTS: ocp.args.JsonSave(facts)}
    arrays = _select_saved(leaves)
    if arrays:
      items[_STATE] = ocp.args.StandardSave(arrays)
    try:
      with _catch_failures():
        self._orbax.save(partial.absolute(), ocp.args.Composite(**items))
      if self._is_first:
        write_manifest(partial, str(step))
        os.rename(partial, self._folder / str(step))
    except OSError:
      self._remove_leftovers()  # Frees what they took.
      raise
    if self._is_first:
      sync_folder(self._folder)
      for step in self.list_steps()[_KEPT:]:
        # Renamed first: half a folder would be a broken checkpoint.
        old = self._folder / f"{step}.old"
        os.rename(self._folder / str(step), old)
        remove_folder(old)

  def _load(self, path: Path, items: dict[str, Any]) -> Any:
    with _catch_failures():
      return self._orbax.restore(path.absolute(), ocp.args.Composite(**items))

  def _remove_leftovers(self) -> None:
    """Removes what killed jobs have left."""
    for pattern in ("*.partial-*", "*.old"):
      for path in self._folder.glob(pattern):
        remove_folder(path)

  def _find_latest(self) -> int:
    """Returns the latest step that can be read, 0 if there is none."""
    steps = self.list_steps()
    for step, before in itertools.pairwise([*steps, 0]):
      path = self._folder / str(step)
      try:
        check_manifest(path)
        return step
      except BrokenFileError as error:
        console.print_notice(
          f"Checkpoint {path} is broken: {error}."
          f" The run goes on from step {before}."
        )
        self._move_aside(path)
    return 0

  def _move_aside(self, path: Path) -> None:
    # Not removed, so that it can be examined.
    aside = path.with_name(f"{path.name}.broken")
    try:
      remove_folder(aside)
      os.rename(path, aside)
    except OSError as error:
      raise JobError(
        f"{path} cannot be moved aside: {console.describe_failure(error)}"
      ) from error

  def _check_leaves(
    self, step: int, saved: list[str], leaves: list[Any]
  ) -> None:
    """Raises if saved leaves have other shapes or dtypes than these."""
    wanted = [_describe_leaf(x) for x in leaves]
    if saved == wanted:
      return
    pairs = zip(saved, wanted, strict=False)  # The shorter list may agree.
    differ = [i for i, (a, b) in enumerate(pairs) if a != b]
    where = (
      f"leaf {differ[0]} is {saved[differ[0]]}, not {wanted[differ[0]]}"
      if differ
      else f"it has {len(saved)} leaves, not {len(wanted)}"
    )
    raise JobError(
      f"the checkpoint of step {step} in {str(self._folder)!r} is of another"
      f" program: {where}. Use another `workdir`."
    )


def read_log(path: Path) -> Log:
  """Returns the log of one checkpoint, without starting JAX."""
  text = (path / _FACTS / "metadata").read_text()
  return Log(**json.loads(text)["log"])


def read_arrays(path: Path) -> dict[str, np.ndarray]:
  """Returns the arrays of one checkpoint by their numbers."""
  folder = (path / _STATE).absolute()
  with _mute_logs():
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    names = checkpointer.metadata(folder).item_metadata.tree
    whole = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(restore_args=dict.fromkeys(names, whole))
    return checkpointer.restore(folder, args)


def _agree_on(value: int) -> int:
  """Returns process 0's value, when all processes have come this far."""
  if jax.process_count() == 1:
    return value
  # By a collective, in which the death of a process is noticed at once.
  return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


@contextlib.contextmanager
def _catch_failures() -> Iterator[None]:
  """Turns what the storage reports of the system into an `OSError`."""
  hook = sys.unraisablehook
  threads = threading.enumerate()

  def report(unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
      hook(unraisable)

  sys.unraisablehook = report
  with _mute_logs():
    try:
      yield
    except Exception as error:
      # Other threads go on, and what they start reports to a closed loop.
      end = time.monotonic() + _JOIN_S
      for thread in set(threading.enumerate()) - set(threads):
        if thread.ident is None:
          continue  # It does not run yet.
        # The `join` of orbax's threads raises what they have raised.
        threading.Thread.join(thread, max(0.0, end - time.monotonic()))
      found = _SYSTEM_ERROR.search(str(error))
      if not found:
        raise
      number = int(found[1])
      raise OSError(number, os.strerror(number)) from error
  sys.unraisablehook = hook


@contextlib.contextmanager
def _mute_logs() -> Iterator[None]:
  """Keeps orbax quiet: it logs its steps, and tracebacks of what it raises."""
  before = logging.root.manager.disable
  logging.disable(logging.CRITICAL)
  try:
    yield
  finally:
    logging.disable(before)


def _describe_leaf(x: Any) -> str:
  x = _to_storable(x)
  return f"{x.dtype.name}{list(x.shape)}"


def _to_storable(x: Any) -> Any:
  """Returns a JAX array or shape as it is, else a NumPy array."""
  is_known = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
  return x if is_known else np.asarray(x)


def _make_empty(like: Any) -> Any:
  """Returns an array of size 0, which no checkpoint has."""
  if not isinstance(like, jax.ShapeDtypeStruct):
    return like
  empty = np.zeros(like.shape, like.dtype)
  return jax.make_array_from_callback(
    like.shape, like.sharding, lambda index: empty[index]
  )


def _select_saved(leaves: list[Any]) -> dict[str, Any]:
  """Returns the leaves that have elements, by their numbers."""
  arrays = {str(i): _to_storable(x) for i, x in enumerate(leaves)}
  return {name: x for name, x in arrays.items() if x.size}
