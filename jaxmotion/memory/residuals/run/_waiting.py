"""Finds results of a backward pass that wait long for a reader."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmotion import program
from jaxmotion.memory.residuals.run import _forward

# Fusions that may end before a reader comes.
_SOON = 2


def find_waiting(steps: Sequence[program.Step]) -> set[program.Value]:
  """Returns results of cheap steps that are read much later, by fusions."""
  # A compiler fuses a cheap step into its readers. Where the reader comes much
  # later, what the step is computed from stays in memory until then: for the
  # gradient of a skip connection, a slice, that of the whole concatenation.
  made: dict[program.Value, int] = {}
  waiting: set[program.Value] = set()
  written: set[program.Value] = set()
  ended = 0
  for step in steps:
    ends = _forward.ends_fusion(step)
    for value in step.reads:
      if value in made and value not in written:
        if ended - made[value] > _SOON:
          waiting.add(value)
        elif ends:
          written.add(value)
    ended += ends
    if not ends:
      most = max((v.nbytes for v in step.reads), default=0)
      made.update((v, ended) for v in step.outs if v.nbytes <= most)
  return waiting
