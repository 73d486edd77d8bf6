"""A function and its backward pass as one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.core import Array, PyTree, abstract_like
from jaxmotion.memory.residuals.trace._kinds import rectified
from jaxmotion.program import (
  Operand,
  Order,
  Program,
  Step,
  Value,
  trace_program,
)


class JointProgram(NamedTuple):
  """A function and its backward pass.

  Attributes:
    program: of both.
    order: of its steps.
    inputs: of the function.
    cotangents: of those outputs that have some.
    outputs: of the function.
    notes: tree of what it says beside them, which has no gradient.
    gradients: for each input; None for one that has none.
    backward: values that depend on a cotangent.
  """

  program: Program
  order: Order
  inputs: tuple[Value, ...]
  cotangents: tuple[Value, ...]
  outputs: tuple[Operand, ...]
  notes: PyTree
  gradients: tuple[Operand | None, ...]
  backward: frozenset[Value]

  def backward_steps(self) -> list[Step]:
    """Those that lead to the gradients and depend on a cotangent."""
    ends = [g for g in self.gradients if g is not None]
    return [
      step
      for step in self.order.leading_to(ends, ())
      if any(v in self.backward for v in step.outs)
    ]


def trace_joint(
  fn: Callable[..., tuple[Sequence[Array], PyTree]],
  args: Sequence[Any],
  outs: Sequence[Any],
) -> JointProgram:
  """Traces a function together with its backward pass.

  Args:
    fn: takes arrays, returns arrays and a tree of notes on them.
    args: what it is called with.
    outs: types of the arrays it returns.
  """
  smooth = [is_smooth(a) for a in args]
  typed = [abstract_like(o) for o in outs if is_smooth(o)]
  size = len(args)

  def both(*values: Array) -> list[Array]:
    given = iter(values[size:])
    cts = [next(given) if is_smooth(o) else _nothing(o) for o in outs]

    def of(*moving: Array) -> tuple[list[Array], PyTree]:
      taken = iter(moving)
      fixed = values[:size]
      results, notes = fn(
        *(next(taken) if s else v for v, s in zip(fixed, smooth, strict=True))
      )
      return list(results), notes

    moving = [v for v, s in zip(values, smooth, strict=False) if s]
    results, pull, notes = jax.vjp(of, *moving, has_aux=True)
    noted, trees["notes"] = jax.tree.flatten(notes)
    return [*results, *noted, *pull(cts)]

  trees: dict[str, Any] = {}
  program = rectified(trace_program(both, *args, *typed))
  inputs, cotangents = program.inputs[:size], program.inputs[size:]
  last = len(outs) + trees["notes"].num_leaves
  gradients = iter(program.outputs[last:])
  return JointProgram(
    program,
    Order(program.steps),
    inputs,
    cotangents,
    program.outputs[: len(outs)],
    jax.tree.unflatten(trees["notes"], program.outputs[len(outs) : last]),
    tuple(next(gradients) if s else None for s in smooth),
    _depending_on(cotangents, program.steps),
  )


def is_smooth(x: Any) -> bool:
  """Says whether an array of this type has a gradient."""
  dtype = x.dtype if hasattr(x, "dtype") else jax.typeof(x).dtype
  return jnp.issubdtype(dtype, jnp.inexact)


def _nothing(x: Any) -> np.ndarray:
  return np.zeros(x.shape, jax.dtypes.float0)


def _depending_on(
  values: Sequence[Value], steps: Sequence[Step]
) -> frozenset[Value]:
  found = set(values)
  for step in steps:
    if any(v in found for v in step.reads):
      found.update(step.outs)
  return frozenset(found)
