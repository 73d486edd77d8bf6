"""The fewest bits whose error stays within a budget."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion.controllers._base import (
  Controller,
  check_signal,
  select_groups,
)
from jaxmotion.controllers._history import (
  History,
  advance_history,
  start_history,
)
from jaxmotion.core import Array, check_int, check_number

# Half a unit in the last place of float32, relative to the value. A lossless
# level measures zero, which would predict zero for the level below.
_LEAST_ERROR = 2.0**-24


class ErrorBudgetState(NamedTuple):
  """State of `error_budget`.

  Attributes:
    history: the levels so far.
    calm: int32[groups], updates in a row after which the level below looked
      good enough.
  """

  history: History
  calm: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class error_budget(Controller):
  """Keeps a measured error under a budget with the fewest bits that do.

  For every group, with e the error measured at its present level:

    if e > budget: level += 1, calm = 0
    else if max(e, 2^-24) growth <= budget: calm += 1, otherwise calm = 0
    if calm == patience: level -= 1, calm = 0

  Up at once, down only when the level below is predicted to stay within the
  budget. It starts at the highest level. The error may be anything that a
  higher level makes smaller: the relative error of weights or gradients,
  ||decode(encode(x)) - x|| / ||x||, or its share of the gradient noise.

  Args:
    budget: greatest error allowed, in the signal's unit.
    levels: number of levels.
    growth: by how much the error grows from one level to the one below: 2^8
      where a level is 8 bits. If it is too small, the level below is tried
      in vain after every `patience` updates.
    patience: updates in a row before it goes down.
    history_size: how many switches are remembered, the start included.

  Raises:
    TypeError, ValueError: an argument that is none of these.

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

  def __post_init__(self) -> None:
    check_number("budget", self.budget, 0)
    check_int("levels", self.levels, 1)
    check_number("growth", self.growth, 1)
    check_int("patience", self.patience, 1)
    check_int("history_size", self.history_size, 1)

  def init(self, signal: Array) -> ErrorBudgetState:
    """Returns the state for as many groups as the signal has."""
    groups = check_signal("signal", signal).shape[0]
    return ErrorBudgetState(
      start_history(groups, self.levels - 1, self.history_size),
      jnp.zeros((groups,), jnp.int32),
    )

  def update(self, signal: Array, state: ErrorBudgetState) -> ErrorBudgetState:
    """Returns the state after a step with these errors."""
    error = check_signal("signal", signal, state.calm.shape[0])
    ok = jnp.isfinite(error)
    now = state.history.level
    over = error > self.budget
    below = jnp.maximum(error, _LEAST_ERROR) * self.growth
    calm = jnp.where(over | (below > self.budget), 0, state.calm + 1)
    down = calm == self.patience
    level = now + over.astype(jnp.int32) - down.astype(jnp.int32)
    level = jnp.clip(level, 0, self.levels - 1)
    calm = select_groups(ok, jnp.where(down, 0, calm), state.calm)
    return ErrorBudgetState(advance_history(state.history, level, ok), calm)
