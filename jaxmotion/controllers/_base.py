"""Base class of controllers, and checks that they share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.core import Array, PyTree, shape_string


@dataclasses.dataclass(frozen=True, kw_only=True)
class Controller:
  """Turns one number per group and update into a level for each group.

  A controller is its configuration: a frozen dataclass of plain Python values.
  Its state is a NamedTuple of arrays, whose first field `history` holds the
  levels so far. Groups do not affect one another. A signal that is not finite
  changes nothing of its group but the count of skipped updates.
  """

  def init(self, signal: PyTree) -> Any:
    """Returns the state before the first update.

    Args:
      signal: float32[groups] as `update` takes it, before training.
    """
    raise NotImplementedError

  def update(self, signal: PyTree, state: Any) -> Any:
    """Returns the state after one more step of training.

    Args:
      signal: float32[groups], of this step.
      state: what `init` or the last `update` returned.

    Raises:
      ValueError: the signal has another number of groups than the state.
    """
    raise NotImplementedError

  def level(self, state: Any) -> Array:
    """Returns the level of every group, int32[groups]; 0 is the fewest bits.

    Args:
      state: what `init` or `update` returned.
    """
    level: Array = state.history.level
    return level


def check_signal(name: str, signal: Any, groups: int | None = None) -> Array:
  """Returns a signal as float32[groups]; raises unless it has that shape.

  Args:
    name: the argument's name, for the message.
    signal: what the caller gave.
    groups: number of groups, or None if any number will do.
  """
  signal = jnp.asarray(signal)
  if signal.ndim != 1 or groups not in (None, signal.shape[0]):
    span = "groups" if groups is None else str(groups)
    raise ValueError(
      f"`{name}` must be float32[{span}], got {shape_string(signal)}."
    )
  return signal.astype(jnp.float32)


def select_groups(ok: Array, new: PyTree, old: PyTree) -> PyTree:
  """Returns `new` for the groups that are ok and `old` for the others.

  Args:
    ok: bool[groups].
    new: pytree of arrays of shape (groups, ...).
    old: pytree of arrays of the same shapes.
  """

  def select_leaf(new: Array, old: Array) -> Array:
    return jnp.where(ok.reshape(-1, *[1] * (new.ndim - 1)), new, old)

  return jax.tree.map(select_leaf, new, old)
