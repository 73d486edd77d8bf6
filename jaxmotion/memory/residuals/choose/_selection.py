"""A function that keeps what it needs, and the backward pass that needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion.core import Array
from jaxmotion.memory._memory_kind import is_on_host
from jaxmotion.memory.residuals.choose._actions import ResidualChoice
from jaxmotion.memory.residuals.choose._min_cut import minimum_cut, wanted
from jaxmotion.memory.residuals.choose._residual import Residual, given
from jaxmotion.memory.residuals.trace import JointProgram, kinds, names
from jaxmotion.program import (
  Step,
  Value,
  is_discontinuous,
  is_expensive,
  is_float_equality,
)

# More than any residual weighs, less than what cannot be cut.
_NEVER = 1 << 50


class Options(NamedTuple):
  """How residuals are chosen and kept.

  Attributes:
    choose: a residual's codec.
    recompute: "cheap" or "all".
    measure: whether to note how full sparse residuals are.
  """

  choose: ResidualChoice
  recompute: str
  measure: bool = False


class SavedResidual(NamedTuple):
  """A value that is kept.

  Attributes:
    value: of the program.
    residual: what it is kept as.
  """

  value: Value
  residual: Residual


class Diagnostics(NamedTuple):
  """What there is to say of a forward pass whose residuals are kept.

  Attributes:
    overflows: residuals that are not all kept, int32[].
    fills: by name of a sparse residual, the share of values of its fullest
      tile that are not zero, float32[].
  """

  overflows: Array
  fills: dict[str, Array]

  @classmethod
  def none(cls) -> Diagnostics:
    """Nothing."""
    return cls(jnp.zeros((), jnp.int32), {})

  def add(self, other: Diagnostics) -> Diagnostics:
    """Both."""
    return Diagnostics(
      self.overflows + other.overflows, {**self.fills, **other.fills}
    )

  def over_steps(self) -> Diagnostics:
    """Of a whole loop, from those of its steps."""
    fills = {name: jnp.max(fill) for name, fill in self.fills.items()}
    return Diagnostics(jnp.sum(self.overflows, dtype=jnp.int32), fills)


class Selection:
  """A function and its backward pass, and what is kept in between.

  Args:
    joint: both.
    inputs: names of the inputs.
    free: of each input, whether it is there anyway.
    options: how residuals are chosen and kept.
    prefix: of the names of residuals.
    repeats: how often the function runs with residuals of its own.

  Attributes:
    kept: what is kept.
    held: what is computed again, and then kept as it is until its last use.
    free: inputs that are there anyway.
    again: names of what was to be computed again.
  """

  def __init__(
    self,
    joint: JointProgram,
    inputs: Sequence[str],
    free: Sequence[bool],
    options: Options,
    prefix: str,
    repeats: int,
  ):
    self.joint, self._options, self._repeats = joint, options, repeats
    self._kind = kinds(joint.program)
    self._label = names(joint.program, inputs, self._kind, prefix)
    self._described: dict[Value, Residual] = {}
    self.free = {v for v, f in zip(joint.inputs, free, strict=True) if f}
    candidates = [v for v in self._label if v not in joint.backward]
    described = [self._describe(v) for v in candidates]
    self.again = [r.name for r in described if r.recomputed]
    kept = self._choose()
    self.held = self._hold(kept)
    self.kept = [SavedResidual(v, self._describe(v)) for v in kept]
    extra = self._ways_out()
    self.kept += [
      SavedResidual(v, self._describe(v)._replace(codec=None)) for v in extra
    ]

  def measured(self) -> list[SavedResidual]:
    """What it is to be noted of how full it is."""
    sparse = [k for k in self.kept if k.residual.kind == "sparse"]
    return sparse if self._options.measure else []

  def only_free(self, inputs: Sequence[Array]) -> list[Array | None]:
    """Returns the inputs that are there anyway, None for others."""
    pairs = zip(self.joint.inputs, inputs, strict=True)
    return [x if v in self.free else None for v, x in pairs]

  def _exact(self, value: Value) -> Residual:
    """A value as a residual that nothing rounds."""
    aval = value.aval
    name, kind = self._label[value], self._kind[value]
    shape = tuple(aval.shape)
    return Residual(name, kind, shape, aval.dtype, repeats=self._repeats)

  def _describe(self, value: Value) -> Residual:
    """A value as the residual that it is to be."""
    if value not in self._described:
      plain = residual = self._exact(value)
      # What a loop kept is where the loop wants it.
      if not (is_on_host(value.aval) or plain.is_of_loop):
        residual = given(plain, self._options.choose)
      may_not = residual.recomputed or residual.may_overflow
      is_argument = value in self.joint.inputs
      self._described[value] = plain if is_argument and may_not else residual
    return self._described[value]

  def _choose(self) -> list[Value]:
    """The values to keep."""
    firm: set[Value] = set()

    def weigh(value: Value) -> int:
      if not hasattr(value.aval, "shape"):
        return 1
      residual = self._describe(value)
      return _NEVER if residual.recomputed else residual.encoded_bytes

    def once(step: Step) -> bool:
      if any(self._describe(v).recomputed for v in step.outs):
        return False
      hard = self._options.recompute == "cheap" and is_expensive(step.eqn)
      return (
        hard or is_float_equality(step.eqn) or not firm.isdisjoint(step.outs)
      )

    while True:
      kept = minimum_cut(self.joint, self.free, weigh, once)
      more = set(self._of_rounded(kept)) - firm
      if not more:
        return kept
      firm |= more

  def _hold(self, kept: Sequence[Value]) -> dict[Value, Residual]:
    """What to hold of that which is computed again: nothing dear is twice."""
    if not (self.again or self._options.recompute == "all"):
      return {}

    def weigh(value: Value) -> int:
      if not hasattr(value.aval, "shape"):
        return 1
      return self._exact(value).encoded_bytes

    known = {*self.free, *kept}
    held = minimum_cut(
      self.joint, known, weigh, lambda step: is_expensive(step.eqn)
    )
    return {v: self._exact(v) for v in held}

  def _of_rounded(self, kept: Sequence[Value]) -> Iterator[Value]:
    """Results of steep steps that would be done again on what was rounded.

    What is computed again in between, by a convolution say, is seldom zero.
    """
    rounded = {v for v in kept if self._describe(v).rounds}
    known = {*kept, *self.free, *self.joint.program.constants}
    again = self.joint.order.leading_to(wanted(self.joint, self.free), known)
    for step in again:
      if is_discontinuous(step.eqn):
        before = self.joint.order.leading_to(step.reads, known)
        used = {v for s in (*before, step) for v in s.reads}
        if used & rounded and not any(is_expensive(s.eqn) for s in before):
          yield from step.outs

  def _ways_out(self) -> list[Value]:
    """Inputs from which the residuals that may overflow can be had."""
    exact = {k.value for k in self.kept if k.residual.is_exact}
    known = {*exact, *self.free, *self.joint.program.constants}
    unsure = [k.value for k in self.kept if k.residual.may_overflow]
    steps = self.joint.order.leading_to(unsure, known)
    used = {v for s in steps for v in s.reads} - known
    return [v for v in self.joint.inputs if v in used]
