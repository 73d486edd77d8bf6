"""Scalars of runs as event files, which TensorBoard shows."""

import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.common import console


class ScalarWriter:
  """Writes the scalars of one run, from its first step or where it resumes.

  Args:
    folder: folder of the run.
    is_quiet: whether to write nothing, as all processes but the first do.

  Raises:
    JobError: tensorboardX is not installed.
  """

  def __init__(self, folder: pathlib.Path, *, is_quiet: bool = False):
    self._folder, self._is_quiet = folder, is_quiet
    self._writer: Any = None
    try:
      import tensorboardX
    except ImportError as error:
      raise console.JobError(
        "`--tensorboard` needs tensorboardX: pip install tensorboardX, or the"
        " extra `experiments`."
      ) from error
    self._make = tensorboardX.SummaryWriter

  def write(self, step: int, scalars: Mapping[str, Any]) -> None:
    """Writes scalars of one step."""
    if self._is_quiet:
      return
    if self._writer is None:
      # A killed run wrote steps that a resumed one repeats: hide these.
      self._writer = self._make(str(self._folder), purge_step=step)
    for name, value in scalars.items():
      self._writer.add_scalar(name, float(value), step)

  def close(self) -> None:
    """Writes what is left to the disk."""
    if self._writer is not None:
      self._writer.close()
