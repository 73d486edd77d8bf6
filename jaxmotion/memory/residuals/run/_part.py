"""Finds parts of a pass of which a compiler holds no more than a cache does."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence

from jaxmotion import program
from jaxmotion.memory.residuals import choose, trace
from jaxmotion.memory.residuals.run import _forward

# Saved values are small beside an array this many times larger.
_SMALL = 8


def find_whole_part(
  joint: trace.JointProgram,
  later: Sequence[program.Step],
  rerun: Sequence[program.Step],
  cached: Iterable[program.Value],
  known: Container[program.Value],
  shared: Collection[program.Value],
) -> list[program.Value]:
  """Returns what a part reads, if it may all be there at once."""
  # A part is what is computed again together, and all steps of the backward
  # pass that read what follows from it. A cache needs barriers. Where a
  # compiler that is left to itself would hold no more than the cache and what
  # the first product reads, it is left the part as `jax.checkpoint` leaves it a
  # layer.
  made = {v for step in rerun for v in step.outs}
  read_again = {v for step in rerun for v in step.reads if v in known}
  reads = dict.fromkeys(v for step in later for v in step.reads)
  traces = {
    v: traced
    for v in reads
    if v not in joint.backward
    and (traced := _trace_back(joint, v, made, known)) is not None
  }
  beside = set[program.Value]().union(*(t for t in traces.values() if t & made))
  own = (made | read_again | beside) - {*shared}
  weights = read_again & {*shared}
  found = [
    v for v, traced in traces.items() if traced & own or traced <= weights
  ]
  if not all(hasattr(v.aval, "shape") for v in found):
    return []
  products = [s for s in (*rerun, *later) if _forward.ends_fusion(s)]
  written = {v.source for s in products for v in s.reads}
  held = choose.find_held(joint, found, written, known)
  first = next(
    (s for s in later if _forward.ends_fusion(s) and {*s.reads} & {*found}),
    None,
  )
  there = {v.source for v in cached}
  # Beside large saved values, a compiler may order the products another way.
  saved = beside - made - read_again - {*shared}
  if _SMALL * choose.count_bytes(saved) > choose.count_bytes(there):
    return []
  if first is not None:
    there |= {v.source for v in first.reads} & held
  return found if choose.count_bytes(held) <= choose.count_bytes(there) else []


def _trace_back(
  joint: trace.JointProgram,
  value: program.Value,
  made: Container[program.Value],
  known: Container[program.Value],
) -> set[program.Value] | None:
  """Returns what a value follows from by cheap steps."""
  ends: set[program.Value] = set()
  todo, seen = [value], {value}
  while todo:
    one = todo.pop()
    if one in made or one in known:
      ends.add(one)
      continue
    maker = joint.order.maker(one)
    if maker is None or program.is_expensive(maker.eqn):
      return None
    todo += [v for v in maker.reads if v not in seen]
    seen.update(maker.reads)
  return ends
