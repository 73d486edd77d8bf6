"""Finds the results of a traced function that differ between workers.

JAX types record the same, but only in maps that check them, and these refuse
loops that start from constants. This reading of a jaxpr takes any program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxmotion import core
from jaxmotion.program import _flatten, _primitives

Axes = frozenset[Any]
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
  varying: Sequence[frozenset[Any]],
  axes: frozenset[Any],
  equal_names: frozenset[str] = frozenset(),
) -> list[frozenset[Any]]:
  """Returns the axes over which each result may differ between workers."""
  # varying: for each operand the axes over which it differs. axes: names of the
  # workers' axes; others are not looked at.
  # equal_names: names that `checkpoint_name` gave to values that are equal on
  # all workers, whatever they were computed from.
  program = _flatten.flatten(jaxpr, calls="all")
  known: dict[Any, Axes] = {
    value: frozenset(over) & axes
    for value, over in zip(program.inputs, varying, strict=True)
  }

  def read(operand: _flatten.Operand | None) -> Axes:
    while isinstance(operand, _flatten.Value):
      if operand in known:
        return known[operand]
      operand = operand.viewed
    return frozenset()

  for step in program.steps:
    ins = [read(operand) for operand in step.ins]
    outs = _step_outputs(step, ins, axes, equal_names)
    known.update(zip(step.outs, outs, strict=True))
    if step.name in _WRITES and not isinstance(
      step.ins[0], core.jax_core.Literal
    ):
      known[step.ins[0]] = frozenset().union(*ins)
  return [read(operand) for operand in program.outputs]


def _step_outputs(
  step: _flatten.Step,
  ins: Sequence[Axes],
  axes: frozenset[Any],
  equal_names: frozenset[str],
) -> list[Axes]:
  """Returns the axes over which the results of one step differ."""
  name, every = _primitives.collective_name(step.name), frozenset().union(*ins)
  if name == "scan":
    return _scan_outputs(step, ins, axes, equal_names)
  if name == "while":
    return _while_outputs(step, ins, axes, equal_names)
  if name == "name" and step.params["name"] in equal_names:
    return [frozenset()]
  if name == "cond":
    # Workers may take different branches.
    branches = [
      find_varying(b, ins[1:], axes, equal_names)
      for b in _flatten.inner_jaxprs(step.eqn)
    ]
    return [ins[0].union(*outs) for outs in zip(*branches, strict=True)]
  named = axes & frozenset(step.axis_names)
  grouped = step.params.get("axis_index_groups") is not None
  if name in _EQUALIZING and not grouped:
    if len(ins) == len(step.outs):
      return [over - named for over in ins]
    return [every - named] * len(step.outs)
  if name in _DISTINCT or (name in _EQUALIZING and grouped):
    return [every | named] * len(step.outs)
  return [every] * len(step.outs)


def _scan_outputs(
  step: _flatten.Step,
  ins: Sequence[Axes],
  axes: frozenset[Any],
  equal_names: frozenset[str],
) -> list[Axes]:
  body, num_consts, num_carry = core.scan_parts(step.params)
  consts, xs = ins[:num_consts], ins[num_consts + num_carry :]
  carry = list(ins[num_consts : num_consts + num_carry])
  while True:
    outs = find_varying(body, [*consts, *carry, *xs], axes, equal_names)
    grown = [a | b for a, b in zip(carry, outs[:num_carry], strict=True)]
    if grown == carry:
      return carry + outs[num_carry:]
    carry = grown


def _while_outputs(
  step: _flatten.Step,
  ins: Sequence[Axes],
  axes: frozenset[Any],
  equal_names: frozenset[str],
) -> list[Axes]:
  num_cond = step.params["cond_nconsts"]
  num_body = num_cond + step.params["body_nconsts"]
  cond_consts, consts = ins[:num_cond], ins[num_cond:num_body]
  carry = list(ins[num_body:])
  while True:
    (goes_on,) = find_varying(
      step.params["cond_jaxpr"], [*cond_consts, *carry], axes, equal_names
    )
    outs = find_varying(
      step.params["body_jaxpr"], [*consts, *carry], axes, equal_names
    )
    # Workers that count to different numbers have different results.
    grown = [a | b | goes_on for a, b in zip(carry, outs, strict=True)]
    if grown == carry:
      return carry
    carry = grown
