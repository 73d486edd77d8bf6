"""Checkpoints of one run: every byte is covered by a checksum.

The folder of a run has one folder for each checkpoint, named by its number of
steps. Each process writes one file there. The folder gets its name when all
files are on the disk, so a killed job leaves no incomplete checkpoint. The last
two checkpoints are kept: if the last is broken, the one before it is used.
"""

import itertools
import os
import pathlib
import secrets
import shutil
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from experiments.common.console import (
  JobError,
  describe_failure,
  print_notice,
)
from experiments.common.parts import (
  BrokenFileError,
  Part,
  Piece,
  read_part,
  write_part,
)

_KEPT = 2  # Checkpoints of a run.


class Log(NamedTuple):
  """Losses and times of a run so far, step by step.

  Attributes:
    loss: loss of each step.
    step_ms: time of each step, milliseconds.
  """

  loss: list[float]
  step_ms: list[float]


class CheckpointStore:
  """Checkpoints of one run: parameters, optimizer state, log.

  The leaves are saved as a flat list, so that no name inside an optimizer
  state (or inside a codec's error memory) becomes part of the format.

  Args:
    folder: folder of the checkpoints of this run.
  """

  def __init__(self, folder: pathlib.Path):
    self._folder = folder
    self._is_first = jax.process_index() == 0

  def save(self, tree: Any, log: Log) -> None:
    """Writes the state after `len(log.loss)` steps and waits for the disk.

    Args:
      tree: pytree of arrays.
      log: losses and times of the steps.

    Raises:
      JobError: the disk is full, or the system refuses for another reason.
    """
    step = len(log.loss)
    try:
      self._write_step(step, tree, log)
    except OSError as error:
      raise JobError(
        f"the checkpoint of step {step} cannot be written to"
        f" {str(self._folder)!r}: {describe_failure(error)}"
      ) from error

  def restore(self, like: Any) -> tuple[Any, Log]:
    """Reads the latest checkpoint that is as it was written.

    A checkpoint that is not is moved aside, and a line says so.

    Args:
      like: a pytree of arrays with the wanted structure, shapes, dtypes and
        shardings.

    Returns:
      The saved tree and log; `like` and an empty log if nothing is saved.

    Raises:
      JobError: the checkpoint belongs to a program with other leaves, or only
        some processes can read it.
    """
    step, parts = self._find_latest() if self._is_first else (0, [])
    step = _agree_on(step)
    if not step:
      return like, Log([], [])
    if not self._is_first:
      try:
        parts = self._read_step(step)
      except BrokenFileError as error:
        raise JobError(
          f"process 0 alone can read step {step}: {error}"
        ) from error
    leaves, structure = jax.tree.flatten(like)
    self._check_leaves(step, parts, leaves)
    pieces: list[list[Piece]] = [[] for _ in leaves]
    for part in parts:
      for piece in part.pieces:
        pieces[piece.leaf].append(piece)
    restored = [_join_leaf(*pair) for pair in zip(leaves, pieces, strict=True)]
    return (
      jax.tree.unflatten(structure, restored),
      Log(**parts[0].facts["log"]),
    )

  def list_steps(self) -> list[int]:
    """Returns the steps that have a checkpoint, latest first."""
    if not self._folder.is_dir():
      return []
    names = [path.name for path in self._folder.iterdir()]
    return sorted((int(n) for n in names if n.isdigit()), reverse=True)

  def _write_step(self, step: int, tree: Any, log: Log) -> None:
    # A process of an earlier job may still live: its token is another one.
    token = _agree_on(secrets.randbits(31))
    partial = self._folder / f"{step}.partial-{token}"
    if self._is_first:
      self._remove_leftovers()
      partial.mkdir(parents=True)
    _agree_on(step)
    leaves = jax.tree.leaves(tree)
    facts = {
      "step": step,
      "process": jax.process_index(),
      "processes": jax.process_count(),
      "leaves": [_describe_leaf(x) for x in leaves],
      "log": log._asdict() if self._is_first else None,
    }
    part = Part(
      facts, [p for i, x in enumerate(leaves) for p in _cut_leaf(i, x)]
    )
    try:
      write_part(partial / _name_part(jax.process_index()), part)
    except OSError:
      shutil.rmtree(partial, ignore_errors=True)  # Frees what it took.
      raise
    _agree_on(step)
    if self._is_first:
      _sync_folder(partial)
      os.rename(partial, self._folder / str(step))
      _sync_folder(self._folder)
      for old in self.list_steps()[_KEPT:]:
        self._remove_step(old)

  def _remove_step(self, step: int) -> None:
    # Renamed first: half a folder would be a broken checkpoint.
    old = self._folder / f"{step}.old"
    os.rename(self._folder / str(step), old)
    shutil.rmtree(old)

  def _remove_leftovers(self) -> None:
    """Removes what killed jobs have left."""
    for pattern in ("*.partial-*", "*.old"):
      for path in self._folder.glob(pattern):
        shutil.rmtree(path, ignore_errors=True)

  def _find_latest(self) -> tuple[int, list[Part]]:
    """Returns the latest step that can be read, 0 if there is none."""
    steps = self.list_steps()
    for step, before in itertools.pairwise([*steps, 0]):
      try:
        return step, self._read_step(step)
      except BrokenFileError as error:
        path = self._folder / str(step)
        print_notice(
          f"Checkpoint {path} is broken: {error}."
          f" The run goes on from step {before}."
        )
        self._move_aside(path)
    return 0, []

  def _move_aside(self, path: pathlib.Path) -> None:
    # Not removed, so that it can be examined.
    aside = path.with_name(f"{path.name}.broken")
    try:
      shutil.rmtree(aside, ignore_errors=True)
      os.rename(path, aside)
    except OSError as error:
      raise JobError(
        f"{path} cannot be moved aside: {describe_failure(error)}"
      ) from error

  def _read_step(self, step: int) -> list[Part]:
    """Returns the parts of all processes.

    Raises:
      BrokenFileError: a part is missing or broken.
    """
    folder = self._folder / str(step)
    first = read_part(folder / _name_part(0))
    count = first.facts["processes"]
    parts = [first]
    parts += [read_part(folder / _name_part(i)) for i in range(1, count)]
    for index, part in enumerate(parts):
      found = [part.facts[key] for key in ("step", "process", "processes")]
      if found != [step, index, count]:
        raise BrokenFileError(f"{_name_part(index)} is of another checkpoint")
    return parts

  def _check_leaves(
    self, step: int, parts: list[Part], leaves: list[Any]
  ) -> None:
    wanted = [_describe_leaf(x) for x in leaves]
    saved = parts[0].facts["leaves"]
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


def _agree_on(value: int) -> int:
  """Returns process 0's value, when all processes have come this far."""
  if jax.process_count() == 1:
    return value
  # By a collective, in which the death of a process is noticed at once.
  return int(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _name_part(process: int) -> str:
  return f"part-{process}"


def _describe_leaf(x: Any) -> str:
  x = _to_storable(x)
  return f"{x.dtype.name}{list(x.shape)}"


def _to_storable(x: Any) -> Any:
  """Returns a JAX array as it is, anything else as a NumPy array."""
  return x if isinstance(x, jax.Array) else np.asarray(x)


def _cut_leaf(index: int, x: Any) -> list[Piece]:
  """Returns the pieces of a leaf that this process saves."""
  x = _to_storable(x)
  if not isinstance(x, jax.Array):
    only = jax.process_index() == 0
    return [Piece(index, (0,) * x.ndim, x)] if only else []
  return [
    Piece(
      index, tuple(s.start or 0 for s in shard.index), np.asarray(shard.data)
    )
    for shard in x.addressable_shards
    if shard.replica_id == 0
  ]


def _join_leaf(like: Any, pieces: list[Piece]) -> Any:
  """Returns a leaf of saved pieces, placed as `like` is."""
  target = _to_storable(like)
  whole = np.empty(target.shape, target.dtype)
  for piece in pieces:
    ends = zip(piece.begin, piece.array.shape, strict=True)
    whole[tuple(slice(b, b + size) for b, size in ends)] = piece.array
  if not isinstance(like, jax.Array):
    return whole
  if like.is_fully_addressable:
    return jax.device_put(whole, like.sharding)
  return jax.make_array_from_callback(
    like.shape, like.sharding, lambda index: whole[index]
  )


def _sync_folder(folder: pathlib.Path) -> None:
  """Waits until the disk has the names in a folder."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  except OSError:
    pass  # Some file systems cannot, and keep names in order by themselves.
  finally:
    os.close(descriptor)
