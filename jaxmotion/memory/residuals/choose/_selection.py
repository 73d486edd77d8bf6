"""Choice of the values that a backward pass saves, and in what form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxmotion.core import Array, check_choice
from jaxmotion.memory._memory_kind import is_on_host
from jaxmotion.memory.residuals.choose._actions import (
  Action,
  ResidualChoice,
  ResidualRules,
  make_choice,
)
from jaxmotion.memory.residuals.choose._min_cut import (
  find_minimum_cut,
  values_read_by_backward,
)
from jaxmotion.memory.residuals.choose._partition import find_partition
from jaxmotion.memory.residuals.choose._residual import Residual, apply_choice
from jaxmotion.memory.residuals.trace import (
  JointProgram,
  classify_values,
  find_divisors,
  name_values,
)
from jaxmotion.program import (
  Step,
  Value,
  is_discontinuous,
  is_expensive,
  is_float_equality,
)

# Cost of saving a value that is to be recomputed: more than all residuals
# together, less than an edge that cannot be cut, so that an argument that is
# the only source is saved all the same.
_RECOMPUTE_COST = 1 << 50


class Options(NamedTuple):
  """Options of the choice of residuals.

  Attributes:
    choose: function of a residual that returns its action.
    recompute: "cheap" or "all"; see `compress_residuals`.
    measure: whether diagnostics measure the nonzeros of sparse residuals.
  """

  choose: ResidualChoice
  recompute: str
  measure: bool = False


def make_options(
  codec: Action | ResidualRules | ResidualChoice, recompute: str
) -> Options:
  """Returns the options that `compress_residuals` was given, checked.

  Args:
    codec: how residuals are saved.
    recompute: "cheap" or "all".

  Raises:
    TypeError: `codec` is of the wrong type.
    ValueError: an option is not among its choices.
  """
  check_choice("recompute", recompute, ("cheap", "all"))
  return Options(make_choice(codec), recompute)


class SavedResidual(NamedTuple):
  """A value of a program that is saved, and its form.

  Attributes:
    value: the value.
    residual: what it is saved as.
  """

  value: Value
  residual: Residual


class Selection(NamedTuple):
  """The values that a function saves for its backward pass.

  Attributes:
    joint: the function and its backward pass.
    always_live: inputs that are never saved, such as parameters.
    saved: values that the forward pass saves.
    cached: values that the backward pass recomputes and then saves exactly
      until their last use; empty where nothing expensive is recomputed.
    measured: saved residuals whose nonzeros diagnostics measure.
    recompute_names: names of the residuals whose action is `recompute`.
  """

  joint: JointProgram
  always_live: frozenset[Value]
  saved: tuple[SavedResidual, ...]
  cached: dict[Value, Residual]
  measured: tuple[SavedResidual, ...]
  recompute_names: tuple[str, ...]

  def mask_inputs(self, inputs: Sequence[Array]) -> list[Array | None]:
    """Returns the inputs that are always live, None for others."""
    pairs = zip(self.joint.inputs, inputs, strict=True)
    return [x if v in self.always_live else None for v, x in pairs]


def choose_residuals(
  joint: JointProgram,
  input_names: Sequence[str],
  always_live: Sequence[bool],
  options: Options,
  prefix: str = "",
  repeats: int = 1,
) -> Selection:
  """Chooses the values to save for the backward pass, and their form.

  1. Each forward value is described as the residual that it would be saved as,
     by the user's choice.
  2. A minimum cut over encoded bytes chooses the values (`_choose_saved`).
  3. If something expensive is recomputed, a second cut chooses which
     recomputed values the backward pass saves again (`_choose_cached`).
  4. Inputs from which an overflowed residual can be recomputed are saved
     exactly (`_inputs_for_overflow`).

  Args:
    joint: the function and its backward pass.
    input_names: names of the function's inputs, for names of residuals.
    always_live: for each input, whether it stays in memory anyway.
    options: options of the choice.
    prefix: prefix of the names of residuals.
    repeats: number of times the function runs with residuals of its own.

  Returns:
    The selection.
  """
  pairs = zip(joint.inputs, always_live, strict=True)
  live = frozenset(v for v, is_live in pairs if is_live)
  table = _ResidualTable(joint, input_names, options.choose, prefix, repeats)
  described = map(table.describe, table.forward_values())
  recompute_names = tuple(r.name for r in described if r.recomputed)
  chosen = _choose_saved(joint, live, table, options.recompute)
  cached: dict[Value, Residual] = {}
  if recompute_names or options.recompute == "all":
    cached = _choose_cached(joint, {*live, *chosen}, table)
  saved = {v: table.describe(v) for v in chosen}
  for value in _inputs_for_overflow(joint, live, saved):
    saved[value] = table.describe(value)._replace(codec=None)
  residuals = tuple(SavedResidual(v, r) for v, r in saved.items())
  sparse = tuple(s for s in residuals if s.residual.kind == "sparse")
  return Selection(
    joint,
    live,
    residuals,
    cached,
    sparse if options.measure else (),
    recompute_names,
  )


class _ResidualTable:
  """The residual that each value of a joint program would be saved as.

  Args:
    joint: the function and its backward pass.
    input_names: names of the function's inputs.
    choose: function of a residual that returns its action.
    prefix: prefix of the names of residuals.
    repeats: number of times the function runs.
  """

  def __init__(
    self,
    joint: JointProgram,
    input_names: Sequence[str],
    choose: ResidualChoice,
    prefix: str,
    repeats: int,
  ):
    self._joint, self._choose, self._repeats = joint, choose, repeats
    self._kind = classify_values(joint.program)
    self._name = name_values(joint.program, input_names, self._kind, prefix)
    self._divisors = find_divisors(joint.program)
    self._described: dict[Value, Residual] = {}

  def forward_values(self) -> list[Value]:
    """Returns the values that depend on no cotangent."""
    return [v for v in self._name if v not in self._joint.backward]

  def describe_exact(self, value: Value) -> Residual:
    """Returns a value as a residual that no codec rounds."""
    aval = value.aval
    name, kind = self._name[value], self._kind[value]
    shape = tuple(aval.shape)
    return Residual(
      name,
      kind,
      shape,
      aval.dtype,
      repeats=self._repeats,
      partition=find_partition(aval),
    )

  def describe(self, value: Value) -> Residual:
    """Returns a value as the residual that it would be saved as.

    Arguments of the function cannot be recomputed, so an action that might
    require that leaves them as they are.
    """
    if value not in self._described:
      exact = residual = self.describe_exact(value)
      # Residuals of an inner scan were already encoded and placed by that
      # scan: leave them as they are. A stack on the host would otherwise be
      # fetched as a whole, then row by row: a transformer of 24 layers in 8
      # bits held 7076 MiB, and 2017 with the stack left where it is.
      if not (is_on_host(value.aval) or exact.is_of_scan):
        residual = apply_choice(exact, self._choose)
      if value in self._divisors and residual.may_round_to_zero:
        residual = residual._replace(codec=None)
      needs_recompute = residual.recomputed or residual.may_overflow
      is_argument = value in self._joint.inputs
      self._described[value] = (
        exact if is_argument and needs_recompute else residual
      )
    return self._described[value]


def _choose_saved(
  joint: JointProgram,
  live: frozenset[Value],
  table: _ResidualTable,
  recompute: str,
) -> list[Value]:
  """Chooses the values to save by minimum cuts over their encoded bytes.

  The backward pass must not rerun a step that is expensive (with
  recompute="cheap") or that compares floats for equality, unless its result is
  to be recomputed by the user's choice. It must neither rerun a discontinuous
  step on rounded operands, but which operands are rounded is known only after
  the cut. So the cut is repeated with the results of such steps added to
  `must_save`, which only grows, until there are no new ones.
  """
  must_save: set[Value] = set()

  def cost(value: Value) -> int:
    if not hasattr(value.aval, "shape"):
      return 1  # An abstract token.
    residual = table.describe(value)
    return _RECOMPUTE_COST if residual.recomputed else residual.encoded_bytes

  def never_recompute(step: Step) -> bool:
    if any(table.describe(v).recomputed for v in step.outs):
      return False
    # A name is given to a value by a step that copies nothing: what is kept is
    # the value.
    is_kept = step.name != "name" and any(
      table.describe(v).kept for v in step.outs
    )
    is_refused = recompute == "cheap" and is_expensive(step.eqn)
    return (
      is_refused
      or is_kept
      or is_float_equality(step.eqn)
      or not must_save.isdisjoint(step.outs)
    )

  while True:
    chosen = find_minimum_cut(joint, live, cost, never_recompute)
    found = set(_discontinuous_on_rounded(joint, live, chosen, table))
    if not found - must_save:
      return chosen
    must_save |= found


def _discontinuous_on_rounded(
  joint: JointProgram,
  live: frozenset[Value],
  chosen: Sequence[Value],
  table: _ResidualTable,
) -> Iterator[Value]:
  """Yields results of discontinuous steps rerun on rounded residuals.

  A ReLU mask recomputed from operands rounded to 8 bits would lose the 1 % of
  them that are rounded to zero. Where an expensive step, a convolution say,
  is rerun between the rounded residual and the comparison, its results are
  seldom exactly zero, and the mask may be recomputed.
  """
  rounded = {v for v in chosen if table.describe(v).is_lossy}
  known = {*chosen, *live, *joint.program.constants}
  rerun = joint.order.leading_to(values_read_by_backward(joint, live), known)
  for step in rerun:
    if is_discontinuous(step.eqn):
      before = joint.order.leading_to(step.reads, known)
      used = {v for s in (*before, step) for v in s.reads}
      if used & rounded and not any(is_expensive(s.eqn) for s in before):
        yield from step.outs


def _choose_cached(
  joint: JointProgram, known: set[Value], table: _ResidualTable
) -> dict[Value, Residual]:
  """Chooses which recomputed values to save again until their last use.

  Without them each reader would recompute for itself: the exponential of a
  transformer's attention scores was computed three times, and XLA kept the
  scores rather than the exponential. The cut goes through values that follow
  without another expensive step from what was recomputed, so no expensive step
  runs more than twice in all. The values are saved exactly: they live for a
  short time only.

  Args:
    joint: the function and its backward pass.
    known: values that are saved or always live.
    table: residual of each value.
  """

  def cost(value: Value) -> int:
    if not hasattr(value.aval, "shape"):
      return 1
    return table.describe_exact(value).encoded_bytes

  chosen = find_minimum_cut(
    joint, known, cost, lambda step: is_expensive(step.eqn)
  )
  return {v: table.describe_exact(v) for v in chosen}


def _inputs_for_overflow(
  joint: JointProgram,
  live: frozenset[Value],
  saved: dict[Value, Residual],
) -> list[Value]:
  """Returns the inputs that recomputing an overflowed residual would read.

  A residual in zero-value coding may have more nonzeros than its capacity. It
  is then recomputed from residuals that are exact and from always-live inputs;
  where these are not enough, from further inputs, which must be saved exactly.
  """
  exact = {v for v, residual in saved.items() if residual.is_exact}
  known = {*exact, *live, *joint.program.constants}
  unsure = [v for v, residual in saved.items() if residual.may_overflow]
  steps = joint.order.leading_to(unsure, known)
  used = {v for s in steps for v in s.reads} - known
  return [v for v in joint.inputs if v in used]
