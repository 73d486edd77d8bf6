"""Choice of the values that a backward pass saves, and in what form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxmotion.core import Array
from jaxmotion.memory.residuals.choose._min_cut import find_minimum_cut
from jaxmotion.memory.residuals.choose._options import Options
from jaxmotion.memory.residuals.choose._residual import Residual
from jaxmotion.memory.residuals.choose._residual_table import ResidualTable
from jaxmotion.memory.residuals.choose._trade import Trade
from jaxmotion.memory.residuals.trace import JointProgram
from jaxmotion.program import Step, Value, is_expensive


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
    matched_names: names of the values that got an action, saved or not.
  """

  joint: JointProgram
  always_live: frozenset[Value]
  saved: tuple[SavedResidual, ...]
  cached: dict[Value, Residual]
  measured: tuple[SavedResidual, ...]
  matched_names: tuple[str, ...]

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
  2. Minimum cuts over seconds choose the values (`Trade`).
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
  table = ResidualTable(joint, input_names, options.choose, prefix, repeats)
  described = map(table.describe, table.forward_values())
  matched_names = tuple(
    r.name for r in described if r.recomputed or r.on_host or r.codec
  )
  trade = Trade(joint, live, table, options)
  cut = trade.choose_cut()
  cached: dict[Value, Residual] = {}
  if any(is_expensive(step.eqn) for step in cut.rerun):
    cached = _choose_cached(joint, trade.reads, {*live, *cut.saved}, table)
  saved = {v: table.describe(v) for v in cut.saved}
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
    matched_names,
  )


def _choose_cached(
  joint: JointProgram,
  reads: Sequence[Value],
  known: set[Value],
  table: ResidualTable,
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
    reads: forward values that the backward pass reads.
    known: values that are saved or always live.
    table: residual of each value.
  """

  def cost(value: Value) -> int:
    if not hasattr(value.aval, "shape"):
      return 1
    return table.describe_exact(value).encoded_bytes

  def rerun_cost(step: Step) -> int | None:
    return None if is_expensive(step.eqn) else 0

  chosen = find_minimum_cut(joint, reads, known, cost, rerun_cost)
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
