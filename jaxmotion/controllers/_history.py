"""The levels that a controller has been at."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxmotion.core import Array


class History(NamedTuple):
  """The newest switches of every group; the start counts as the first one.

  Attributes:
    step: int32[], updates so far.
    skipped: int32[groups], updates whose signal was not finite and changed
      nothing else of the group.
    total: int32[groups], switches so far, those dropped included.
    steps: int32[groups, capacity], the updates after which the level changed,
      newest first; -1 where there was no switch yet.
    levels: int32[groups, capacity], what it changed to; -1 likewise.
  """

  step: Array
  skipped: Array
  total: Array
  steps: Array
  levels: Array

  @property
  def level(self) -> Array:
    """The present levels, int32[groups]."""
    return self.levels[:, 0]

  @property
  def dropped(self) -> Array:
    """How many of the oldest switches are forgotten, int32[groups]."""
    return jnp.maximum(self.total - self.steps.shape[1], 0)


class LevelChange(NamedTuple):
  """A level and where it begins.

  Attributes:
    step: updates before it.
    group: position of the group.
    level: the level from then on.
  """

  step: int
  group: int
  level: int


def start_history(groups: int, level: int, capacity: int) -> History:
  """Returns the history of groups that all start at a level."""
  empty = jnp.full((groups, capacity), -1, jnp.int32)
  return History(
    step=jnp.zeros((), jnp.int32),
    skipped=jnp.zeros((groups,), jnp.int32),
    total=jnp.ones((groups,), jnp.int32),
    steps=empty.at[:, 0].set(0),
    levels=empty.at[:, 0].set(level),
  )


def advance_history(history: History, level: Array, ok: Array) -> History:
  """Returns the history after one more update.

  Args:
    history: up to now.
    level: int32[groups], the levels from now on.
    ok: bool[groups], whether the group's signal was finite; where it was not,
      the level stays.
  """
  step = history.step + 1
  moved = ok & (level != history.level)

  def push(newest: Array, old: Array) -> Array:
    pushed = jnp.concatenate([newest[:, None], old[:, :-1]], axis=1)
    return jnp.where(moved[:, None], pushed, old)

  return History(
    step=step,
    skipped=history.skipped + (~ok).astype(jnp.int32),
    total=history.total + moved.astype(jnp.int32),
    steps=push(jnp.broadcast_to(step, level.shape), history.steps),
    levels=push(level.astype(jnp.int32), history.levels),
  )


def level_changes(history: History) -> list[LevelChange]:
  """Lists the switches that are remembered, oldest first.

  A group's level is constant between its switches, so this is all there is to
  plot, from a group's first switch here on; that is its start unless
  `history.dropped` says otherwise.

  Args:
    history: of a controller's state, on the host (not traced).

  Returns:
    Switches in the order of their steps, then of their groups.

  Example:
    >>> from jaxmotion import controllers
    >>> controller = controllers.awp(threshold=0.0, interval=1, levels=3)
    >>> state = controller.init(jnp.array([1.0, 1.0]))
    >>> state = controller.update(jnp.array([0.9, 1.1]), state)
    >>> [tuple(switch) for switch in level_changes(state.history)]
    [(0, 0, 0), (0, 1, 0), (1, 0, 1)]
  """
  steps, levels = np.asarray(history.steps), np.asarray(history.levels)
  found = [
    LevelChange(int(steps[g, i]), g, int(levels[g, i]))
    for g, i in zip(*np.nonzero(steps >= 0), strict=True)
  ]
  return sorted(LevelChange(s, int(g), level) for s, g, level in found)
