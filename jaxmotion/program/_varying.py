"""Follows marks of values through a traced program, such as where they differ.

JAX types record over which axes values vary, but only in maps that check them,
and these refuse loops that start from constants. This reading of a jaxpr takes
any program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxmotion import core
from jaxmotion.program import _flatten, _primitives

Marks = frozenset[Any]
# (step, marks of its operands) -> marks of its results.
Rule = Callable[[_flatten.Step, Sequence[Marks]], Sequence[Marks]]
# Their results are equal on all workers of the axes that they name.
_EQUALIZING = frozenset(
  """
  all_gather all_gather_invariant assert_replicated pmax pmin psum psum2
  psum_invariant
  """.split()
)
# Their results differ between workers, whatever the operands are.
_DISTINCT = frozenset("all_to_all axis_index ppermute reduce_scatter".split())
_WRITES = frozenset("addupdate swap".split())


def find_varying(
  jaxpr: Any,
  varying: Sequence[Marks],
  axes: Marks,
  equal_names: frozenset[str] = frozenset(),
) -> list[Marks]:
  """Returns the axes over which each result may differ between workers."""
  # varying: for each operand the axes over which it differs. axes: names of the
  # workers' axes; others are not looked at.
  # equal_names: names that `checkpoint_name` gave to values that are equal on
  # all workers, whatever they were computed from.

  def mark_results(step: _flatten.Step, ins: Sequence[Marks]) -> list[Marks]:
    name, count = _primitives.collective_name(step.name), len(step.outs)
    if name == "name" and step.params["name"] in equal_names:
      return [frozenset()]
    every, named = frozenset().union(*ins), axes & frozenset(step.axis_names)
    grouped = step.params.get("axis_index_groups") is not None
    if name in _EQUALIZING and not grouped:
      if len(ins) == count:
        return [over - named for over in ins]
      return [every - named] * count
    if name in _DISTINCT or (name in _EQUALIZING and grouped):
      every |= named
    return [every] * count

  return follow_marks(
    jaxpr, [axes.intersection(over) for over in varying], mark_results
  )


def follow_marks(jaxpr: Any, marks: Sequence[Marks], rule: Rule) -> list[Marks]:
  """Returns the marks of a program's results, from those of its operands."""
  # rule: for all steps but loops and branches, which are entered. What depends
  # on several values has the marks of all.
  program = _flatten.flatten(jaxpr, calls="all")
  known: dict[Any, Marks] = dict(zip(program.inputs, marks, strict=True))

  def read(operand: _flatten.Operand | None) -> Marks:
    while isinstance(operand, _flatten.Value):
      if operand in known:
        return known[operand]
      operand = operand.viewed
    return frozenset()

  for step in program.steps:
    ins = [read(operand) for operand in step.ins]
    outs = _CONTROL.get(step.name, _apply_rule)(step, ins, rule)
    known.update(zip(step.outs, outs, strict=True))
    if step.name in _WRITES and not isinstance(
      step.ins[0], core.jax_core.Literal
    ):
      known[step.ins[0]] = frozenset().union(*ins)
  return [read(operand) for operand in program.outputs]


def _apply_rule(
  step: _flatten.Step, ins: Sequence[Marks], rule: Rule
) -> Sequence[Marks]:
  return rule(step, ins)


def _follow_branches(
  step: _flatten.Step, ins: Sequence[Marks], rule: Rule
) -> list[Marks]:
  # Workers may take different branches.
  branches = [
    follow_marks(b, ins[1:], rule) for b in _flatten.inner_jaxprs(step.eqn)
  ]
  return [ins[0].union(*outs) for outs in zip(*branches, strict=True)]


def _follow_scan(
  step: _flatten.Step, ins: Sequence[Marks], rule: Rule
) -> list[Marks]:
  body, num_consts, num_carry = core.scan_parts(step.params)
  consts, xs = ins[:num_consts], ins[num_consts + num_carry :]
  carry = list(ins[num_consts : num_consts + num_carry])
  while True:
    outs = follow_marks(body, [*consts, *carry, *xs], rule)
    grown = [a | b for a, b in zip(carry, outs[:num_carry], strict=True)]
    if grown == carry:
      return carry + outs[num_carry:]
    carry = grown


def _follow_while(
  step: _flatten.Step, ins: Sequence[Marks], rule: Rule
) -> list[Marks]:
  num_cond = step.params["cond_nconsts"]
  num_body = num_cond + step.params["body_nconsts"]
  cond_consts, consts = ins[:num_cond], ins[num_cond:num_body]
  carry = list(ins[num_body:])
  while True:
    (goes_on,) = follow_marks(
      step.params["cond_jaxpr"], [*cond_consts, *carry], rule
    )
    outs = follow_marks(step.params["body_jaxpr"], [*consts, *carry], rule)
    # Workers that count to different numbers have different results.
    grown = [a | b | goes_on for a, b in zip(carry, outs, strict=True)]
    if grown == carry:
      return carry
    carry = grown


_CONTROL = {
  "cond": _follow_branches,
  "scan": _follow_scan,
  "while": _follow_while,
}
