"""Work folders of jobs: a killed job continues bit for bit."""

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from ml_collections import ConfigDict

from experiments.common import records

# Fields that may change between two starts: a longer list only adds runs.
_FREE_FIELDS = ("cases", "exchanges", "seeds", "checkpoint_every")


class Run(NamedTuple):
  """Measurements of one finished training run.

  Attributes:
    exchange: name of the exchange.
    seed: seed of the run.
    score: score on the held-out data, in the task's unit.
    loss: loss of the last training step.
    wire_bytes: bytes that one worker sends in one step, by the traced program;
      with several processes, bytes sent to other processes.
    compiled_bytes: the same bytes, by the compiled program.
    compile_s: seconds to trace and compile the step.
    step_ms: median time of a step, milliseconds.
  """

  exchange: str
  seed: int
  score: float
  loss: float
  wire_bytes: int
  compiled_bytes: int
  compile_s: float
  step_ms: float


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
    self._manager = ocp.CheckpointManager(
      folder.absolute(),
      options=ocp.CheckpointManagerOptions(max_to_keep=1, create=True),
    )

  def save(self, tree: Any, log: Log) -> None:
    """Writes the state after `len(log.loss)` steps and waits for the disk."""
    leaves = [_to_storable(x) for x in jax.tree.leaves(tree)]
    args = ocp.args.Composite(
      leaves=ocp.args.StandardSave(leaves),
      log=ocp.args.JsonSave(log._asdict()),
    )
    self._manager.save(len(log.loss), args=args)
    self._manager.wait_until_finished()

  def restore(self, like: Any) -> tuple[Any, Log]:
    """Reads the latest checkpoint.

    Args:
      like: a pytree of arrays with the wanted structure, shapes, dtypes and
        shardings.

    Returns:
      The saved tree and log; `like` and an empty log if nothing is saved.
    """
    step = self._manager.latest_step()
    if step is None:
      return like, Log([], [])
    leaves, structure = jax.tree.flatten(like)
    abstract = [_to_abstract(x) for x in leaves]
    args = ocp.args.Composite(
      leaves=ocp.args.StandardRestore(abstract), log=ocp.args.JsonRestore()
    )
    saved = self._manager.restore(step, args=args)
    return jax.tree.unflatten(structure, saved["leaves"]), Log(**saved["log"])

  def close(self) -> None:
    """Ends the background threads of the checkpointer."""
    self._manager.close()


def _to_storable(x: Any) -> Any:
  """Returns a JAX array as it is, anything else as a NumPy array."""
  return x if isinstance(x, jax.Array) else np.asarray(x)


def _to_abstract(x: Any) -> Any:
  """Returns how to restore a leaf: a NumPy array stays a NumPy array."""
  if not isinstance(x, jax.Array):
    return np.asarray(x)
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


class Workdir:
  """Folder of one job: its configuration, checkpoints and finished runs.

  Several processes share one folder. Only the first process writes to it,
  except for checkpoints: each process writes those of its own workers.

  Args:
    folder: path of the folder; created if absent.
    config: configuration of the job.
    record: NamedTuple type of finished runs, with values that JSON knows.

  Raises:
    ValueError: the folder belongs to another configuration, or the processes
      do not share it.
  """

  def __init__(
    self,
    folder: str | os.PathLike[str],
    config: ConfigDict,
    record: Callable[..., Any] = Run,
  ):
    self._record = record
    self._folder = pathlib.Path(folder)
    self._runs = self._folder / "runs.jsonl"
    self._is_first = jax.process_index() == 0
    if self._is_first:
      self._folder.mkdir(parents=True, exist_ok=True)
      self._claim_folder(config)
    if jax.process_count() > 1:
      # The other processes must see the file that the first one wrote.
      multihost_utils.sync_global_devices(f"{self._folder} is claimed")
      self._find_claim(config)

  def _claim_folder(self, config: ConfigDict) -> None:
    fields = json.loads(config.to_json())
    ours = {k: v for k, v in fields.items() if k not in _FREE_FIELDS}
    path = self._folder / "config.json"
    if not path.exists():
      records.write_lines(path, [ours])
      return
    (theirs,) = records.read_lines(path)
    changed = sorted(k for k in ours | theirs if ours.get(k) != theirs.get(k))
    if changed:
      raise ValueError(
        "`workdir` must be empty or belong to this configuration, got"
        f" {str(self._folder)!r}, which differs in {', '.join(changed)}."
      )

  def _find_claim(self, config: ConfigDict) -> None:
    if not (self._folder / "config.json").exists():
      raise ValueError(
        "`workdir` must be a folder that all processes share, got"
        f" {str(self._folder)!r}, where process {jax.process_index()} does not"
        " find what process 0 has written."
      )
    self._claim_folder(config)

  def read_runs(self) -> list[Any]:
    """Returns the finished runs, in the order they finished."""
    return [self._record(**line) for line in records.read_lines(self._runs)]

  def add_run(self, run: Any) -> None:
    """Records that a run is finished, so that it is not repeated."""
    if not self._is_first:
      return
    runs = [*self.read_runs(), run]
    records.write_lines(self._runs, (r._asdict() for r in runs))

  def open_store(self, case: str, seed: int) -> CheckpointStore:
    """Returns the checkpoints of one run."""
    return CheckpointStore(self._folder / "checkpoints" / f"{case}-seed{seed}")
