"""History of the levels that a controller has chosen."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmotion import core
from jaxmotion.core import Array


class History(NamedTuple):
  """The newest level changes of every group; the start counts as the first.

  Attributes:
    step: int32[], updates so far.
    skipped: int32[groups], updates whose signal was not finite and changed
      nothing else of the group.
    total: int32[groups], level changes so far, dropped ones included.
    steps: int32[groups, capacity], numbers of updates before each change, the
      newest change first; -1 for an empty slot.
    levels: int32[groups, capacity], level after each change; -1 likewise.

  Example:
    >>> from jaxmotion import controllers
    >>> history = controllers.fixed(1).init(jnp.zeros(2)).history
    >>> history.level.tolist(), history.total.tolist()
    ([1, 1], [1, 1])
  """

  step: Array
  skipped: Array
  total: Array
  steps: Array
  levels: Array

  @property
  def level(self) -> Array:
    """The present level of every group, int32[groups]."""
    return self.levels[:, 0]

  @property
  def dropped(self) -> Array:
    """Number of the oldest changes that are no longer held, int32[groups]."""
    return jnp.maximum(self.total - self.steps.shape[1], 0)


class LevelChange(NamedTuple):
  """One level change of one group.

  Attributes:
    step: number of updates before the change.
    group: position of the group.
    level: level from then on.

  Example:
    >>> from jaxmotion import controllers
    >>> state = controllers.fixed(1).init(jnp.zeros(1))
    >>> controllers.level_changes(state.history)
    [LevelChange(step=0, group=0, level=1)]
  """

  step: int
  group: int
  level: int


def start_history(groups: int, level: int, capacity: int) -> History:
  """Returns the history of groups that all start at one level."""
  empty = jnp.full((groups, capacity), -1, jnp.int32)
  return History(
    step=jnp.zeros((), jnp.int32),
    skipped=jnp.zeros((groups,), jnp.int32),
    total=jnp.ones((groups,), jnp.int32),
    steps=empty.at[:, 0].set(0),
    levels=empty.at[:, 0].set(level),
  )


def advance_history(history: History, level: Array, ok: Array) -> History:
  """Returns the history after one more update."""
  # `level`: int32[groups], the levels from now on.
  # `ok`: bool[groups], whether the group's signal was finite; where it was not,
  # the level stays.
  step = history.step + 1
  changed = ok & (level != history.level)

  def push_newest(newest: Array, old: Array) -> Array:
    pushed = jnp.concatenate([newest[:, None], old[:, :-1]], axis=1)
    return jnp.where(changed[:, None], pushed, old)

  return History(
    step=step,
    skipped=history.skipped + (~ok).astype(jnp.int32),
    total=history.total + changed.astype(jnp.int32),
    steps=push_newest(jnp.broadcast_to(step, level.shape), history.steps),
    levels=push_newest(level.astype(jnp.int32), history.levels),
  )


def level_changes(history: History) -> list[LevelChange]:
  """Lists the level changes that are held, oldest first.

  A group's level is constant between its changes, so these are all the points
  of a plot, from the group's first change in the list. That first change is the
  group's start unless `history.dropped` is positive.

  Args:
    history: history of a controller's state, on the host (not traced).

  Returns:
    Changes in the order of their steps, then of their groups.

  Example:
    >>> from jaxmotion import controllers
    >>> controller = controllers.awp(threshold=0.0, interval=1, levels=3)
    >>> state = controller.init(jnp.array([1.0, 1.0]))
    >>> state = controller.update(jnp.array([0.9, 1.1]), state)
    >>> [tuple(change) for change in level_changes(state.history)]
    [(0, 0, 0), (0, 1, 0), (1, 0, 1)]
  """
  core.check_instance("history", history, History, "the history of a state")
  steps, levels = np.asarray(history.steps), np.asarray(history.levels)
  found = [
    LevelChange(int(steps[g, i]), int(g), int(levels[g, i]))
    for g, i in zip(*np.nonzero(steps >= 0), strict=True)
  ]
  return sorted(found)
