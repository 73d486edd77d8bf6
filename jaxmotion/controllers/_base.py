"""Base class of controllers, and checks that they share."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.controllers import _history
from jaxmotion.core import Array, PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Controller:
  """Turns one number per group and update into a level for each group.

  A controller is its configuration: a frozen dataclass of plain Python values.
  Its state is a NamedTuple of arrays, whose first field `history` holds the
  levels so far. Groups do not affect one another. A signal that is not finite
  changes nothing of its group but the count of skipped updates.

  Example:
    >>> from jaxmotion import controllers
    >>> controller = controllers.fixed(1)  # Any controller is used like this.
    >>> state = controller.init(jnp.zeros(2))
    >>> state = controller.update(jnp.array([0.3, 0.1]), state)
    >>> controller.level(state).tolist()
    [1, 1]
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
    level: Array = check_state(state).history.level
    return level


def check_signal(name: str, signal: Any, groups: int | None = None) -> Array:
  """Returns a signal as float32[groups]; raises unless it has that shape."""
  try:
    signal = jnp.asarray(signal)
  except (OverflowError, TypeError, ValueError):
    raise TypeError(
      f"`{name}` must be an array of numbers, got {signal!r:.200}."
    ) from None
  if not _is_number(signal):
    raise TypeError(
      f"`{name}` must be an array of numbers, got {core.shape_string(signal)}."
    )
  if signal.ndim != 1 or not signal.size or groups not in (None, signal.size):
    span = "groups" if groups is None else str(groups)
    raise ValueError(
      f"`{name}` must be float32[{span}], got {core.shape_string(signal)}."
    )
  return signal.astype(jnp.float32)


def _is_number(x: Array) -> bool:
  kinds = (jnp.floating, jnp.integer)
  return any(jnp.issubdtype(x.dtype, kind) for kind in kinds)


def check_state(state: Any, kind: type[Any] = tuple) -> Any:
  """Returns a controller's state; raises unless it is one."""
  source = "what `init` or the last `update` returned"
  core.check_instance("state", state, kind, source)
  core.check_instance(
    "state", getattr(state, "history", None), _history.History, source
  )
  shape = jnp.shape(state.history.levels)
  of_groups = jax.tree.leaves(state._replace(history=state.history[1:]))
  if (
    len(shape) != 2
    or jnp.shape(state.history.steps) != shape
    or any(jnp.shape(x)[:1] != shape[:1] for x in of_groups)
  ):
    shapes = jax.tree.map(jnp.shape, tuple(state))
    raise ValueError(f"`state` must be {source}, got shapes {shapes}.")
  return state


def check_slots(name: str, value: Any) -> None:
  """Raises unless `value` is a number of slots that fits into memory."""
  core.check_int(name, value, 1, 1 << 20)


def check_updates(name: str, value: Any) -> None:
  """Raises unless `value` is a number of updates that int32 counts."""
  core.check_int(name, value, 1, jnp.iinfo(jnp.int32).max)


def select_groups(ok: Array, new: PyTree, old: PyTree) -> PyTree:
  """Returns `new` for the groups that are ok and `old` for the others."""
  # `ok`: bool[groups].
  # `new`: pytree of arrays of shape (groups, ...).

  def select_leaf(new: Array, old: Array) -> Array:
    return jnp.where(ok.reshape(-1, *[1] * (new.ndim - 1)), new, old)

  return jax.tree.map(select_leaf, new, old)
