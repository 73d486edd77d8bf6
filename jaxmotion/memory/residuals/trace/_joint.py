"""Traces a function together with its backward pass into one flat program.

One program of both passes lets the minimum cut see every value of the forward
pass and every read of the backward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import zero_from_primal

from jaxmotion import core
from jaxmotion.core import Array, PyTree
from jaxmotion.memory.residuals.trace import _kinds
from jaxmotion.program import (
  Operand,
  Order,
  Program,
  Step,
  Value,
  flatten,
  has_effects,
)


class JointProgram(NamedTuple):
  """One program of a function and its backward pass.

  Attributes:
    program: steps of the forward and the backward pass.
    order: dependency order of its steps.
    inputs: inputs of the function.
    cotangents: cotangents of the inexact outputs, inputs of the program.
    outputs: outputs of the function.
    diagnostics: tree of auxiliary outputs, which have no gradient.
    gradients: gradient for each input; None for one that has none.
    backward: values that depend on a cotangent.
    effects: steps of the forward pass that have no results but effects.
    backward_effects: those of the backward pass.
  """

  program: Program
  order: Order
  inputs: tuple[Value, ...]
  cotangents: tuple[Value, ...]
  outputs: tuple[Operand, ...]
  diagnostics: PyTree
  gradients: tuple[Operand | None, ...]
  backward: frozenset[Value]
  effects: tuple[Step, ...]
  backward_effects: tuple[Step, ...]

  def backward_steps(self) -> list[Step]:
    """Returns the steps of the backward pass, in order."""
    # These are the steps that lead to a gradient and depend on a cotangent.
    # Steps of `jax.vjp`'s forward rules that depend on no cotangent (masks,
    # say) count as forward: the cut decides whether they run in the backward
    # pass.
    ends = [g for g in self.gradients if g is not None]
    return [
      step
      for step in self.order.leading_to(ends, (), self.backward_effects)
      if any(v in self.backward for v in step.outs or step.reads)
    ]


def trace_joint(
  fn: Callable[..., tuple[Sequence[Array], PyTree]],
  args: Sequence[Any],
  outs: Sequence[Any],
) -> JointProgram:
  """Traces a function together with its backward pass."""
  has_gradient = [core.is_inexact(a) for a in args]
  ct_types = [o.strip_weak_type() for o in outs if core.is_inexact(o)]
  count = len(args)
  trees: dict[str, Any] = {}

  def run_both_passes(*values: Array) -> list[Array]:
    inexact_cts = iter(values[count:])
    try:
      results, pull, notes = jax.vjp(fn, *values[:count], has_aux=True)
      cts = [
        next(inexact_cts) if core.is_inexact(y) else zero_from_primal(y)
        for y in results
      ]
      gradients = pull(cts)
    except (NotImplementedError, ValueError) as e:
      raise ValueError(
        "`fn` must be differentiable in reverse mode with respect to all of "
        f"its floating-point arguments, got {_first_line(e)} Apply "
        "`jax.lax.stop_gradient` to what needs no gradient."
      ) from e
    flat_notes, trees["notes"] = jax.tree.flatten(notes)
    # The gradient of an integer is empty.
    inexact = itertools.compress(gradients, has_gradient)
    return [*results, *flat_notes, *inexact]

  program = _kinds.reuse_relu_outputs(
    flatten(jax.make_jaxpr(run_both_passes)(*args, *ct_types))
  )
  inputs, cotangents = program.inputs[:count], program.inputs[count:]
  last = len(outs) + trees["notes"].num_leaves
  gradients = iter(program.outputs[last:])
  backward = _find_dependents(cotangents, program.steps)
  effects = [s for s in program.steps if not s.outs and has_effects(s.eqn)]
  has_ct = [any(v in backward for v in s.reads) for s in effects]
  return JointProgram(
    program,
    Order(program.steps),
    inputs,
    cotangents,
    program.outputs[: len(outs)],
    jax.tree.unflatten(trees["notes"], program.outputs[len(outs) : last]),
    tuple(next(gradients) if h else None for h in has_gradient),
    backward,
    tuple(s for s, of_ct in zip(effects, has_ct, strict=True) if not of_ct),
    tuple(s for s, of_ct in zip(effects, has_ct, strict=True) if of_ct),
  )


def _first_line(error: Exception) -> str:
  line = str(error).strip().partition("\n")[0]
  return f"{type(error).__name__}: {line.rstrip('.')}."


def _find_dependents(
  values: Sequence[Value], steps: Sequence[Step]
) -> frozenset[Value]:
  """Returns the given values and all that are computed from one of them."""
  found = set(values)
  for step in steps:
    if any(v in found for v in step.reads):
      found.update(step.outs)
  return frozenset(found)
