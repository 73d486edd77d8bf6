"""Finds losses of which the compiler holds no more than a cut does.

Between the two passes of a small loss, what a cut recomputes is still there:
the last product has just read it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from jaxmotion import program
from jaxmotion.memory.residuals import trace

# An array this many times smaller than another is free to keep beside it.
_SMALL = 8


def gains_nothing(
  joint: trace.JointProgram,
  reads: Sequence[program.Value],
  saved: Sequence[program.Value],
) -> bool:
  """Says whether a cut holds no fewer bytes than the compiler between
  passes."""
  # That is so if the results of the function are small, it has no loop, and
  # what the compiler holds is no more than the cut and what the last product
  # reads. The compiler is taken to hold, of all that the backward pass reads,
  # the results of expensive steps and the operands of products from which it
  # follows. Inputs of the function are there in both cases.
  if not all(hasattr(v.aval, "shape") for v in (*reads, *saved)):
    return False
  inputs = {*joint.inputs, *joint.program.constants}
  steps = [
    step
    for step in joint.program.steps
    if not any(v in joint.backward for v in (*step.reads, *step.outs))
  ]
  if any(step.name in ("cond", "scan", "while") for step in steps):
    return False
  most = max((v.nbytes for v in reads), default=0)
  results = [v for v in joint.outputs if isinstance(v, program.Value)]
  if any(_SMALL * v.nbytes > most for v in results):
    return False
  products = [s for s in steps if _is_product(s)]
  written = {v.source for s in products for v in s.reads}
  last = {v.source for v in products[-1].reads} if products else set()
  held = find_held(joint, reads, written) - inputs
  cut = {v.source for v in saved} - inputs
  return count_bytes(held) <= count_bytes(cut | (last & held))


def find_held(
  joint: trace.JointProgram,
  reads: Iterable[program.Value],
  written: Container[program.Value],
  known: Container[program.Value] = (),
) -> set[program.Value]:
  """Returns the arrays in memory that some values follow from."""
  # A compiler that is left to itself holds the results of expensive steps, and
  # operands of products.
  held: set[program.Value] = set()
  seen: set[program.Value] = set()
  todo = [v.source for v in reads]
  while todo:
    value = todo.pop()
    if value in seen:
      continue
    seen.add(value)
    if value in known:
      continue
    maker = joint.order.maker(value)
    if maker is None or program.is_expensive(maker.eqn) or value in written:
      held.add(value)
    else:
      todo += [v.source for v in maker.reads]
  return held


def count_bytes(values: Iterable[program.Value]) -> int:
  """Returns the bytes of all arrays."""
  return sum(v.nbytes for v in values)


def _is_product(step: program.Step) -> bool:
  """Says whether a step is a matmul, a convolution or the like."""
  return program.is_expensive(step.eqn) and step.name not in program.REDUCTIONS
