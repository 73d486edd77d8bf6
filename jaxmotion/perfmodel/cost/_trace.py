"""Traces a function into the flat program whose cost is counted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmotion.program import (
  Step,
  Value,
  flatten,
  has_barriers,
  open_jaxpr,
)


class CountedProgram(NamedTuple):
  """A flat program with all calls written out, without unused steps.

  Attributes:
    inputs: constants and arguments, in memory before the program starts.
    steps: operations in program order.
    outputs: results; None is a constant of the program's text.
    guessed: primitives that hold a jaxpr and are taken to run it once.
    has_barriers: whether something holds the compiler to an order.
    uniform: arrays of one constant, which are written nowhere.
    sealed: views of arrays that a barrier of `jax.checkpoint` returns.
  """

  inputs: tuple[Value, ...]
  steps: tuple[Step, ...]
  outputs: tuple[Value | None, ...]
  guessed: tuple[str, ...]
  has_barriers: bool
  uniform: frozenset[Value] = frozenset()
  sealed: frozenset[Value] = frozenset()


def trace_counted(
  fn: Callable[..., Any], *args: Any, backend: str
) -> CountedProgram:
  """Traces a function without running it."""
  traceable = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
  jaxpr = open_jaxpr(traceable.trace(*args).jaxpr)
  wanted = [True] * len(jaxpr.outvars)
  # `flatten` drops unused steps as well, but does not look into loops.
  jaxpr, *_ = dce_jaxpr(jaxpr, wanted, instantiate=True)
  return flatten_counted(jaxpr, backend)


def flatten_counted(
  jaxpr: Any, backend: str, uniform: Collection[int] = ()
) -> CountedProgram:
  """Flattens a jaxpr, its constants among the inputs."""
  program = flatten(jaxpr, calls="all", backend=backend)
  # Constants of inlined calls are no arrays of the caller's.
  own = list(program.constants)[: len(open_jaxpr(jaxpr).constvars)]
  outputs = (v if isinstance(v, Value) else None for v in program.outputs)
  return CountedProgram(
    (*own, *program.inputs),
    program.steps,
    tuple(outputs),
    program.guessed,
    has_barriers(jaxpr),
    frozenset(program.inputs[i] for i in uniform),
    program.sealed,
  )
