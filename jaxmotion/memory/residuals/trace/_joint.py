"""Traces a function together with its backward pass into one flat program.

One program of both passes lets the minimum cut see every value of the forward
pass and every read of the backward pass.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_derivatives import zero_from_primal

from jaxmotion import core, program
from jaxmotion.core import Array, PyTree
from jaxmotion.memory.residuals.trace import _kinds
from jaxmotion.program import Operand, Order, Program, Step, Value

# Effects that `jax.checkpoint` allows. Inside shard_map the names of mesh axes
# count as effects.
_ALLOWED_EFFECTS = (
  "DebugEffect",
  "ErrorEffect",
  "NamedAxisEffect",
  "OrderedDebugEffect",
)


class JointProgram(NamedTuple):
  """One program of a function and its backward pass."""

  program: Program
  order: Order
  inputs: tuple[Value, ...]
  cotangents: tuple[Value, ...]  # Of inexact outputs: inputs of the program.
  outputs: tuple[Operand, ...]
  diagnostics: PyTree  # Auxiliary outputs, which have no gradient.
  gradients: "tuple[Operand | None, ...]"  # None for an input without one.
  backward: frozenset[Value]  # What depends on a cotangent.
  effects: tuple[Step, ...]  # Forward steps with effects but no results.
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
      if not self.backward.isdisjoint(step.outs or step.reads)
    ]

  def find_sources(
    self, value: Value, is_source: Callable[[Value], bool]
  ) -> dict[Value, Step | None]:
    """Returns what a value follows from by cheap steps, with their makers."""
    # The walk to operands ends at sources, inputs and expensive steps.
    sources: dict[Value, Step | None] = {}
    todo, seen = [value], {value}
    while todo:
      value = todo.pop()
      maker = self.order.maker(value)
      if maker is None or program.is_expensive(maker.eqn) or is_source(value):
        sources[value] = maker
      else:
        todo += [v for v in dict.fromkeys(maker.reads) if v not in seen]
        seen.update(maker.reads)
    return sources

  def find_held(
    self,
    reads: Iterable[Value],
    written: Container[Value],
    known: Container[Value] = (),
  ) -> set[Value]:
    """Predicts the arrays that XLA alone would hold for readers of values."""
    # A compiler that is left to itself holds the results of expensive steps,
    # and operands of products, which are `written`.
    # known: values that are in memory anyway, and are not counted.
    held: set[Value] = set()
    seen: set[Value] = set()
    todo = [v.source for v in reads]
    while todo:
      value = todo.pop()
      if value in seen or value in known:
        continue
      seen.add(value)
      maker = self.order.maker(value)
      if maker is None or program.is_expensive(maker.eqn) or value in written:
        held.add(value)
      else:
        todo += [v.source for v in maker.reads]
    return held


class Positions:
  """Positions of the steps that make and read each value."""

  def __init__(self, steps: Sequence[Step]):
    self.steps = steps
    self.maker = {v: i for i, step in enumerate(steps) for v in step.outs}
    self.readers: dict[Value, list[int]] = collections.defaultdict(list)
    for i, step in enumerate(steps):
      for value in dict.fromkeys(step.reads):
        self.readers[value].append(i)


def count_bytes(values: Iterable[Value]) -> int:
  """Returns the bytes of all arrays."""
  return sum(v.nbytes for v in values)


def is_product(step: Step) -> bool:
  """Says whether a step is a matmul, a convolution or the like."""
  # A compiler writes to memory what such a step reads and makes: no fusion goes
  # beyond it.
  return program.is_expensive(step.eqn) and step.name not in program.REDUCTIONS


def product_operands(steps: Iterable[Step]) -> set[Value]:
  """Returns the arrays that matmuls, convolutions and the like read."""
  return {v.source for s in steps if is_product(s) for v in s.reads}


def check_effects(fn: Callable[..., PyTree], effects: Any) -> None:
  """Raises if a function has side effects that must happen exactly once."""
  refused = [e for e in effects if type(e).__name__ not in _ALLOWED_EFFECTS]
  if refused:
    inner = fn.func if isinstance(fn, functools.partial) else fn
    name = getattr(inner, "__name__", repr(inner))
    raise ValueError(
      "`fn` must have no side effects but those of `jax.debug` and `checkify`, "
      f"got {name} with {refused}: its backward pass may run parts of it again."
    )


def trace_joint(
  fn: Callable[..., tuple[Sequence[Array], PyTree]],
  args: Sequence[Any],
  outs: Sequence[Any],
) -> JointProgram:
  """Traces a function together with its backward pass."""
  has_gradient = [core.is_inexact(a) for a in args]
  ct_types = [o.strip_weak_type() for o in outs if core.is_inexact(o)]
  count = len(args)
  notes_tree: Any = None

  def run_both_passes(*values: Array) -> list[Array]:
    """Returns outputs, diagnostics and the gradients of inexact arguments."""
    nonlocal notes_tree
    inexact_cts = iter(values[count:])
    try:
      results, pull, notes = jax.vjp(fn, *values[:count], has_aux=True)
      cts = [
        next(inexact_cts) if core.is_inexact(y) else zero_from_primal(y)
        for y in results
      ]
      gradients = pull(cts)
    except (NotImplementedError, ValueError) as e:
      line = str(e).strip().partition("\n")[0].rstrip(".")
      raise ValueError(
        "`fn` must be differentiable in reverse mode with respect to all of "
        f"its floating-point arguments, got {type(e).__name__}: {line}. Apply "
        "`jax.lax.stop_gradient` to what needs no gradient."
      ) from e
    flat_notes, notes_tree = jax.tree.flatten(notes)
    # The gradient of an integer is empty.
    inexact = itertools.compress(gradients, has_gradient)
    return [*results, *flat_notes, *inexact]

  traced = jax.make_jaxpr(run_both_passes)(*args, *ct_types)
  flat = _kinds.reuse_relu_outputs(program.flatten(traced))
  cotangents = flat.inputs[count:]
  last = len(outs) + notes_tree.num_leaves
  gradients = iter(flat.outputs[last:])
  backward = set(cotangents)
  for step in flat.steps:
    if not backward.isdisjoint(step.reads):
      backward.update(step.outs)
  effects: tuple[list[Step], list[Step]] = [], []
  for step in flat.steps:
    if not step.outs and program.has_effects(step.eqn):
      effects[not backward.isdisjoint(step.reads)].append(step)
  return JointProgram(
    flat,
    Order(flat.steps),
    flat.inputs[:count],
    cotangents,
    flat.outputs[: len(outs)],
    notes_tree.unflatten(flat.outputs[len(outs) : last]),
    tuple(next(gradients) if h else None for h in has_gradient),
    frozenset(backward),
    tuple(effects[0]),
    tuple(effects[1]),
  )
