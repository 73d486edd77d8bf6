"""Choice of the values that a backward pass saves, and in what form."""

import copy
from collections.abc import Sequence
from typing import NamedTuple

from jaxmotion import program
from jaxmotion.core import Array
from jaxmotion.memory.residuals import trace
from jaxmotion.memory.residuals.choose import (
  _actions,
  _min_cut,
  _residual,
  _trade,
)
from jaxmotion.program import Step, Value


class Selection(NamedTuple):
  """The values that a function saves for its backward pass."""

  joint: trace.JointProgram
  always_live: frozenset[Value]  # Inputs never saved, such as parameters.
  saved: dict[Value, _residual.Residual]  # By the forward pass.
  # What the backward pass recomputes and then saves exactly until its last use;
  # empty where nothing expensive is recomputed.
  cached: dict[Value, _residual.Residual]
  # Saved residuals whose nonzeros diagnostics measure.
  measured: dict[Value, _residual.Residual]
  # Positions of the loops, among those of the forward pass, that the backward
  # pass runs again.
  rerun_loops: frozenset[int] = frozenset()
  # What is kept as it is, instead of `saved`, for a function that the compiler
  # is left to; None for all others.
  plain: tuple[Value, ...] | None = None

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
  """

  def __init__(
    self,
    joint: trace.JointProgram,
    input_names: Sequence[str],
    always_live: Sequence[bool],
    options: _actions.Options,
    prefix: str = "",
    repeats: int = 1,
    reruns_loops: bool = False,
  ):
    # prefix: of the names of residuals; repeats: times that the function runs
    # with residuals of its own; reruns_loops: whether the backward pass may run
    # a loop again as a whole.
    self.joint, self._measure = joint, options.measure
    pairs = zip(joint.inputs, always_live, strict=True)
    self._live = frozenset(v for v, is_live in pairs if is_live)
    self._table = _residual.ResidualTable(
      joint, input_names, options.choose, prefix, repeats
    )
    described = map(self._table.describe, self._table.forward_values())
    # Names of the values that got an action, saved or not.
    self.matched_names = tuple(
      r.name for r in described if r.recomputed or r.on_host or r.codec
    )
    self._reruns_loops = reruns_loops
    self._trade = _trade.Trade(
      joint,
      self._live,
      self._table,
      options.device,
      reruns_loops,
      has_budget=options.memory_budget is not None,
    )
    self._chosen: dict[tuple[Value, ...], Selection] = {}

  def choose(self, budget: float | None) -> Selection:
    """Returns the selection for a budget, the same object for the same cut."""
    cut = self._trade.choose_cut(budget)
    key = tuple(cut.saved)
    if key not in self._chosen:
      self._chosen[key] = self._select(cut)
    return self._chosen[key]

  def leave_plain(self, selection: Selection) -> Selection:
    """Returns the selection, marked if the compiler alone holds no more."""
    # Between the two passes of a small loss, what a cut recomputes is still
    # there: the last product has just read it. Then all values that the
    # backward pass reads are kept for the compiler. It chooses what it writes,
    # as in plain training. That is so if the results of the function are small
    # and it has no loop.
    if (
      self._measure
      or self.matched_names
      or any(r.kept for r in selection.saved.values())
      or not self._trade.holds_more([*selection.saved])
    ):
      return selection
    return selection._replace(plain=tuple(self._trade.reads))

  def without_gradients(self, wanted: Sequence[bool]) -> "ResidualChooser":
    """Returns the chooser for a backward pass of some of the gradients."""
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
    other = copy.copy(self)
    other.joint = self.joint._replace(gradients=gradients)
    other._trade = self._trade.with_joint(other.joint)
    other._chosen = {}
    return other

  def _select(self, cut: _trade.Cut) -> Selection:
    """Returns what is saved, cached and measured for a cut."""
    joint, live = self.joint, self._live
    saved = {v: self._table.describe(v) for v in cut.saved}
    cached: dict[Value, _residual.Residual] = {}
    if any(program.is_expensive(step.eqn) for step in cut.rerun):
      cached = _min_cut.choose_cached(
        joint, self._trade.reads, {*live, *saved}, self._table
      )
    for value in _inputs_for_overflow(joint, live, saved):
      saved[value] = self._table.describe(value)._replace(codec=None)
    measured = {
      v: r for v, r in saved.items() if self._measure and r.kind == "sparse"
    }
    rerun = _find_rerun_loops(joint, cut, saved) if self._reruns_loops else ()
    return Selection(joint, live, saved, cached, measured, frozenset(rerun))


def _find_rerun_loops(
  joint: trace.JointProgram,
  cut: _trade.Cut,
  saved: dict[Value, _residual.Residual],
) -> list[int]:
  """Returns which loops run again as a whole: no buffer of theirs is saved."""
  # Positions are those among the loops of the forward pass.
  saved_loops: set[Step | None] = set()
  for value, residual in saved.items():
    if residual.is_of_scan:
      # Buffers are laid out by views.
      saved_loops.add(joint.order.maker(value.source))
  loops = [
    step
    for step in joint.program.steps
    if step.name == "scan" and joint.backward.isdisjoint(step.outs)
  ]
  rerun = {*cut.rerun} - saved_loops
  return [i for i, step in enumerate(loops) if step in rerun]


def _inputs_for_overflow(
  joint: trace.JointProgram,
  live: frozenset[Value],
  saved: dict[Value, _residual.Residual],
) -> list[Value]:
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
