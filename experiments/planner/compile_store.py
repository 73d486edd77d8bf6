"""Compiled bytes of steps, kept by the text of the program."""

import hashlib
import os
import pathlib
from typing import NamedTuple

import jax

from experiments.common import console, records
from experiments.residuals import cases, measure
from jaxmotion import program


class CompiledStep(NamedTuple):
  """Figures of a compiled step.

  Attributes:
    device_bytes: all bytes that the device must hold.
    compile_s: processor seconds of the compilation.
  """

  device_bytes: int
  compile_s: float


class CompileStore:
  """Compiles steps for a device, each program once.

  A program's key is its text before compilation, so a figure holds whichever
  plan the program came from, and after any change that leaves the text.

  Args:
    target: device to compile for, a key of `measure.TARGETS`.
    path: file of what is known, read before and replaced after every
      compilation; None keeps figures in memory only.

  Attributes:
    count: steps that were asked for.
    known_s: processor seconds that compilations of known programs took once.

  Raises:
    JobError: the file holds something else.
  """

  def __init__(self, target: str, path: str | os.PathLike[str] | None = None):
    self._target = target
    self._path = None if path is None else pathlib.Path(path)
    self._known: dict[str, CompiledStep] = {}
    for line in records.read_lines(self._path) if self._path else []:
      if set(line) != {"key", *CompiledStep._fields}:
        raise console.JobError(
          f"{str(path)!r} must hold what `planner.memory` compiled, got a line"
          f" of {', '.join(line) or 'nothing'}."
        )
      key = line.pop("key")
      self._known[key] = CompiledStep(**line)
    self.count, self.known_s = 0, 0.0

  def compile(self, step: cases.StepProgram) -> CompiledStep:
    """Returns the figures of a step, compiled unless it is known."""
    self.count += 1
    lowered = measure.lower_traced(
      measure.trace_step(step, self._target), self._target
    )
    about = f"{self._target} {jax.__version__}\n"
    text = about + lowered.as_text()
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    if key in self._known:
      self.known_s += self._known[key].compile_s
      return self._known[key]
    begin = measure.processor_seconds()
    nbytes = program.device_bytes(lowered.compile().memory_analysis())
    found = CompiledStep(nbytes, measure.processor_seconds() - begin)
    self._known[key] = found
    if self._path is not None:
      lines = [{"key": k, **f._asdict()} for k, f in self._known.items()]
      # A line that a full disk cuts off would make the file unreadable.
      records.write_lines(self._path, lines)
    return found
