"""Makers of states that belong to a step and to no optax chain."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from jaxmotion import core
from jaxmotion.core import PyTree

_NAME = "state_maker"


class StateMaker(NamedTuple):
  """Function that makes one worker's state, wherever the axis is bound.

  Attributes:
    init: parameters, whole on every worker -> one worker's state.
    by_device: whether devices of a host remember errors of different parts.
    divide: parameters -> `Fragments`, of `local_updates`; otherwise None.
  """

  init: Callable[[PyTree], PyTree]
  by_device: bool = False
  divide: Callable[[PyTree], Any] | None = None

  def attach(self, init: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `init` of a step, which `find_maker` finds this in."""
    setattr(init, _NAME, self)
    return init


def find_maker(
  tx: optax.GradientTransformation | Callable[..., Any],
) -> StateMaker:
  """Returns the function that makes one worker's state inside of a map.

  Args:
    tx: optax chain, or the `init` of a step that makes its own state.

  Raises:
    TypeError: it is neither.
  """
  maker = getattr(tx, _NAME, None)
  if isinstance(maker, StateMaker):
    return maker
  core.check_instance(
    "tx",
    tx,
    optax.GradientTransformation,
    "an optax transformation, or the `init` of a builder",
  )
  chain: Any = tx
  return StateMaker(chain.init)
