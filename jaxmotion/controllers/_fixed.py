"""Controller that never changes its level."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.controllers import _base, _history
from jaxmotion.core import PyTree


class FixedState(NamedTuple):
  """State of the `fixed` controller.

  Attributes:
    history: history of the one level.

  Example:
    >>> from jaxmotion import controllers
    >>> controllers.fixed(2).init(jnp.zeros(3)).history.level.tolist()
    [2, 2, 2]
  """

  history: _history.History


@dataclasses.dataclass(frozen=True)
class fixed(_base.Controller):
  """Stays at one level: a static format for code that takes a controller.

  It takes the signal of any controller and reads only its shape.

  Args:
    at: the level, at least 0.

  Raises:
    TypeError, ValueError: `at` is not an integer of at least 0.

  Example:
    >>> controller = fixed(2)
    >>> state = controller.init(jnp.zeros(3))
    >>> controller.level(controller.update(jnp.zeros(3), state)).tolist()
    [2, 2, 2]
  """

  at: int

  def __post_init__(self) -> None:
    core.check_int("at", self.at, 0, jnp.iinfo(jnp.int32).max)

  def init(self, signal: PyTree) -> FixedState:
    """Returns the state of the one level.

    Args:
      signal: pytree of float32[groups], of which only the shape is read.
    """
    core.check_arrays("signal", signal)
    shapes = {jnp.shape(x) for x in jax.tree.leaves(signal)}
    if len(shapes) != 1 or len(min(shapes)) != 1:
      raise ValueError(
        f"`signal` must be arrays float32[groups], got shapes {sorted(shapes)}."
      )
    ((groups,),) = shapes
    return FixedState(_history.start_history(groups, self.at, 1))

  def update(self, signal: PyTree, state: FixedState) -> FixedState:
    """Returns the state after a step, at the same level.

    Args:
      signal: ignored.
      state: what `init` or the last `update` returned.
    """
    del signal
    level = _base.check_state(state, FixedState).history.level
    return FixedState(
      _history.advance_history(
        state.history, level, jnp.full_like(level, True, bool)
      )
    )
