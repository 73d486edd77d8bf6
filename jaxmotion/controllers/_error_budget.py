"""Controller that picks the fewest bits whose error stays within a budget."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.controllers import _base
from jaxmotion.core import Array

# Smallest error assumed: half a unit in the last place of float32, relative to
# the element. A lossless level measures zero, which would predict zero for the
# level below.
_MIN_ERROR = 2.0**-24
_MAX_GROWTH = 2.0**64  # All bits of a level; float32 holds its product.


class ErrorBudgetState(NamedTuple):
  """State of the `error_budget` controller."""

  history: _base.History
  # int32[groups], consecutive updates after which the level below was predicted
  # to stay within the budget.
  streak: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  budget=core.number(0),
  levels=core.integer(1, _base.MAX_SLOTS),
  growth=core.number(1, _MAX_GROWTH),
  patience=core.integer(1, _base.MAX_UPDATES),
  history_size=core.integer(1, _base.MAX_SLOTS),
)
class error_budget(_base.Controller):
  """Keeps a measured error within a budget at the lowest level that does.

  For every group, with e the error measured at its present level:

    if e > budget: level += 1, streak = 0
    else if max(e, 2^-24) growth <= budget: streak += 1, otherwise streak = 0
    if streak == patience: level -= 1, streak = 0

  The level rises at once, and falls only when the level below is predicted to
  stay within the budget. It starts at the highest level. The error may be any
  number that a higher level makes smaller. It may be the relative error of
  weights or gradients, ||decode(encode(x)) - x|| / ||x||, or its share of the
  gradient noise.

  Args:
    budget: largest error allowed, in the signal's unit.
    levels: number of levels.
    growth: factor by which the error grows from one level to the one below:
      2^8 if a level is 8 bits. If it is too small, the level below is tried in
      vain after every `patience` updates.
    patience: number of consecutive updates before the level falls.
    history_size: number of level changes that are held, the start included.

  Raises:
    TypeError, ValueError: an argument outside its range.

  Example:
    >>> controller = error_budget(budget=0.01, levels=3, patience=1)
    >>> state = controller.init(jnp.zeros(1))
    >>> levels = []
    >>> for error in (0.0, 2e-5, 0.005, 0.02):
    ...   state = controller.update(jnp.array([error]), state)
    ...   levels += controller.level(state).tolist()
    >>> levels
    [1, 0, 0, 1]
  """

  budget: float
  levels: int = 4
  growth: float = 256.0
  patience: int = 100
  history_size: int = 64

  @core.declare(signal=_base.check_signal)
  def init(self, signal: Array) -> ErrorBudgetState:
    """Returns the state before training, at the highest level."""
    groups = signal.shape[0]
    return ErrorBudgetState(
      _base.start_history(groups, self.levels - 1, self.history_size),
      jnp.zeros((groups,), jnp.int32),
    )

  @core.declare(state=_base.state_of(ErrorBudgetState))
  def update(self, signal: Array, state: ErrorBudgetState) -> ErrorBudgetState:
    """Returns the state after a step, from errors at the present levels."""
    error = _base.check_signal("signal", signal, state.streak.shape[0])
    ok = jnp.isfinite(error)
    now = state.history.level
    exceeds = error > self.budget
    predicted = jnp.maximum(error, _MIN_ERROR) * self.growth
    streak = jnp.where(exceeds | (predicted > self.budget), 0, state.streak + 1)
    falls = streak == self.patience
    level = now + exceeds.astype(jnp.int32) - falls.astype(jnp.int32)
    level = jnp.clip(level, 0, self.levels - 1)
    streak = jnp.where(falls, 0, streak)
    return _base.advance_state(state, level, ok, streak=streak)
