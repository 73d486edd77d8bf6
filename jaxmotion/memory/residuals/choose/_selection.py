"""Choice of the values that a backward pass saves, and in what form."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

from jaxmotion import program
from jaxmotion.core import Array
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import (
  _cached,
  _cut,
  _options,
  _residual,
  _residual_table,
  _trade,
  _turn,
)


class SavedResidual(NamedTuple):
  """A value of a program that is saved, and its form.

  Attributes:
    value: the value.
    residual: what it is saved as.
  """

  value: program.Value
  residual: _residual.Residual


class Selection(NamedTuple):
  """The values that a function saves for its backward pass.

  Attributes:
    joint: the function and its backward pass.
    always_live: inputs that are never saved, such as parameters.
    saved: values that the forward pass saves.
    cached: values that the backward pass recomputes and then saves exactly
      until their last use; empty where nothing expensive is recomputed.
    measured: saved residuals whose nonzeros diagnostics measure.
    rerun_loops: positions of the loops, among those of the forward pass, that
      the backward pass runs again.
    plain: values that are kept as they are, instead of `saved`, for a function
      that the compiler is left to; None for all others.
  """

  joint: trace.JointProgram
  always_live: frozenset[program.Value]
  saved: tuple[SavedResidual, ...]
  cached: dict[program.Value, _residual.Residual]
  measured: tuple[SavedResidual, ...]
  rerun_loops: frozenset[int] = frozenset()
  plain: tuple[program.Value, ...] | None = None

  def mask_inputs(self, inputs: Sequence[Array]) -> list[Array | None]:
    """Returns the inputs that are always live, None for others."""
    pairs = zip(self.joint.inputs, inputs, strict=True)
    return [x if v in self.always_live else None for v, x in pairs]


class ResidualChooser:
  """Chooses the values to save for the backward pass, and their form.

  1. Each forward value is described as the residual that it would be saved as,
     by the user's choice.
  2. Minimum cuts over seconds choose the values (`Trade`).
  3. If something expensive is recomputed, a second cut chooses which
     recomputed values the backward pass saves again (`choose_cached`).
  4. Inputs from which an overflowed residual can be recomputed are saved
     exactly (`_inputs_for_overflow`).

  Args:
    joint: the function and its backward pass.
    input_names: names of the function's inputs, for names of residuals.
    always_live: for each input, whether it stays in memory anyway.
    options: options of the choice.
    prefix: prefix of the names of residuals.
    repeats: number of times the function runs with residuals of its own.
    reruns_loops: whether the backward pass may run a loop again as a whole.

  Attributes:
    joint: the function and its backward pass.
    matched_names: names of the values that got an action, saved or not.
  """

  def __init__(
    self,
    joint: trace.JointProgram,
    input_names: Sequence[str],
    always_live: Sequence[bool],
    options: _options.Options,
    prefix: str = "",
    repeats: int = 1,
    reruns_loops: bool = False,
  ):
    self.joint, self._measure = joint, options.measure
    pairs = zip(joint.inputs, always_live, strict=True)
    self._live = frozenset(v for v, is_live in pairs if is_live)
    table = _residual_table.ResidualTable(
      joint, input_names, options.choose, prefix, repeats
    )
    described = map(table.describe, table.forward_values())
    self.matched_names = tuple(
      r.name for r in described if r.recomputed or r.on_host or r.codec
    )
    self._table, self._reruns_loops = table, reruns_loops
    self._trade = _trade.Trade(
      joint, self._live, table, options.device, reruns_loops=reruns_loops
    )
    self._chosen: dict[int, Selection] = {}

  def choose(self, budget: float | None) -> Selection:
    """Returns the selection for a budget, the same object for the same cut."""
    cut = self._trade.choose_cut(budget)
    if id(cut) not in self._chosen:  # The trade keeps all cuts.
      self._chosen[id(cut)] = self._select(cut)
    return self._chosen[id(cut)]

  def leave_plain(self, selection: Selection) -> Selection:
    """Returns a selection that leaves small losses to the compiler."""
    # Where the compiler holds no more than the cut, all values that the
    # backward pass reads are kept for it. It chooses what it writes, as in
    # plain training.
    reads, saved = self._trade.reads, [s.value for s in selection.saved]
    has_actions = bool(self.matched_names) or any(
      s.residual.kept for s in selection.saved
    )
    if self._measure or has_actions:
      return selection
    if not _turn.gains_nothing(self.joint, reads, saved):
      return selection
    return selection._replace(plain=tuple(reads))

  def without_gradients(self, wanted: Sequence[bool]) -> ResidualChooser:
    """Returns the chooser for a backward pass of the gradients that are
    wanted."""
    # Barriers tie all gradients of a backward pass together, so that a compiler
    # would keep those that nothing reads. A loop computes those of its carry
    # for itself: they stay, because XLA needs more memory for a loop with a
    # result that nothing reads.
    loops = [s for s in self.joint.program.steps if s.name == "scan"]
    gradients = tuple(
      g if is_wanted or any(g in loop.outs for loop in loops) else None
      for g, is_wanted in zip(self.joint.gradients, wanted, strict=True)
    )
    if gradients == self.joint.gradients:
      return self
    found = copy.copy(self)
    found.joint = self.joint._replace(gradients=gradients)
    found._trade = self._trade.with_joint(found.joint)
    found._chosen = {}
    return found

  def keep_flows(self, keep: bool) -> None:
    """Keeps, or frees, what makes choices for other budgets fast."""
    self._trade.keep_flows(keep)

  def _select(self, cut: _cut.Cut) -> Selection:
    joint, live, table = self.joint, self._live, self._table
    cached: dict[program.Value, _residual.Residual] = {}
    if any(program.is_expensive(step.eqn) for step in cut.rerun):
      known = {*live, *cut.saved}
      cached = _cached.choose_cached(joint, self._trade.reads, known, table)
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
      sparse if self._measure else (),
      _find_rerun_loops(joint, cut, saved)
      if self._reruns_loops
      else frozenset(),
    )


def _find_rerun_loops(
  joint: trace.JointProgram,
  cut: _cut.Cut,
  saved: dict[program.Value, _residual.Residual],
) -> frozenset[int]:
  """Returns the positions of loops of whose buffers none are saved."""
  # Positions are those among the loops of the forward pass.
  kept: set[program.Step | None] = set()
  for value, residual in saved.items():
    maker = joint.order.maker(value)
    # Buffers are laid out by views.
    while (
      residual.is_of_scan and maker is not None and maker.name in program.VIEWS
    ):
      maker = joint.order.maker(maker.reads[0])
    if residual.is_of_scan:
      kept.add(maker)
  loops = [
    step
    for step in joint.program.steps
    if step.name == "scan" and not any(v in joint.backward for v in step.outs)
  ]
  rerun = {*cut.rerun} - kept
  return frozenset(i for i, step in enumerate(loops) if step in rerun)


def _inputs_for_overflow(
  joint: trace.JointProgram,
  live: frozenset[program.Value],
  saved: dict[program.Value, _residual.Residual],
) -> list[program.Value]:
  """Returns the inputs that recomputing an overflowed residual would read."""
  # A residual in zero-value coding may have more nonzeros than its capacity. It
  # is then recomputed from residuals that are exact and from always-live
  # inputs; where these are not enough, from further inputs, which must be saved
  # exactly.
  exact = {v for v, residual in saved.items() if residual.is_exact}
  known = {*exact, *live, *joint.program.constants}
  unsure = [v for v, residual in saved.items() if residual.may_overflow]
  steps = joint.order.leading_to(unsure, known)
  used = {v for s in steps for v in s.reads} - known
  return [v for v in joint.inputs if v in used]
