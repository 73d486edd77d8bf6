"""Finds saved arrays that a compiler may compute in the backward pass."""

from __future__ import annotations

from jaxmotion import program
from jaxmotion.memory.residuals import choose

# An array this many times smaller than another is free to keep beside it.
SMALL = 8


def find_free_to_delay(selection: choose.Selection) -> set[program.Value]:
  """Returns saved arrays that follow from as few bytes, by cheap steps
  alone."""
  # A compiler that computes such an array in the backward pass keeps what it
  # follows from, which takes no more memory. There it writes the result over
  # that, which a barrier would keep it from. Rows of a loop are none of these:
  # they are written at the end of each iteration.
  joint = selection.joint
  kept = {*selection.always_live, *joint.program.constants}
  kept.update(s.value for s in selection.saved)
  found: set[program.Value] = set()
  for value, residual in selection.saved:
    if residual.repeats > 1 or residual.is_computed or residual.on_host:
      continue
    most = value.nbytes
    sources: dict[program.Value, program.Step | None] = {}
    todo, seen = [value], {value}
    while todo:
      one = todo.pop()
      maker = joint.order.maker(one)
      if one is not value and one in kept:
        continue
      if maker is None or program.is_expensive(maker.eqn):
        sources[one] = maker
        continue
      new = [v for v in dict.fromkeys(maker.reads) if v not in seen]
      seen.update(new)
      todo += new
    large = {v: s for v, s in sources.items() if _is_large(v, most)}
    # A reduction is delayed with what it reads: packed bits with their array.
    if any(
      s is not None and s.name in program.REDUCTIONS for s in large.values()
    ):
      continue
    if sum(v.nbytes for v in large) <= most:
      found.add(value)
  return found


def _is_large(value: program.Value, most: int) -> bool:
  return SMALL * value.nbytes > most
