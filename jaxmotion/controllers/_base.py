"""Base class of controllers, the history of their levels, and shared checks."""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import core
from jaxmotion.core import Array, PyTree

MAX_SLOTS = 1 << 20  # Levels, or changes that are held: they fit into memory.
MAX_UPDATES = 2**31 - 1  # What int32 counts.
_State = TypeVar("_State")


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


@core.declare(history=core.instance(History, "the history of a state"))
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
  steps, levels = np.asarray(history.steps), np.asarray(history.levels)
  return sorted(
    LevelChange(int(steps[g, i]), int(g), int(levels[g, i]))
    for g, i in zip(*np.nonzero(steps >= 0), strict=True)
  )


def start_history(groups: int, level: int, capacity: int) -> History:
  """Returns the history of groups that all start at one level."""
  # The newest change is first, here the start at step 0. A step of -1 is none.
  empty = jnp.full((groups, capacity), -1, jnp.int32)
  return History(
    step=jnp.zeros((), jnp.int32),
    skipped=jnp.zeros((groups,), jnp.int32),
    total=jnp.ones((groups,), jnp.int32),
    steps=empty.at[:, 0].set(0),
    levels=empty.at[:, 0].set(level),
  )


def advance_state(
  state: _State, level: Array, ok: Array, **fields: Array
) -> _State:
  """Returns a state after one more update that set its level and fields."""
  # `level`: int32[groups], the levels from now on.
  # `ok`: bool[groups], whether the group's signal was finite; where it was not,
  # the level and the fields stay.
  old: Any = state
  history: History = old.history
  step = history.step + 1
  changed = ok & (level != history.level)

  def push_newest(newest: Array, old: Array) -> Array:
    """Puts a change first, and drops the oldest, where the level changed."""
    pushed = jnp.concatenate([newest[:, None], old[:, :-1]], axis=1)
    return jnp.where(changed[:, None], pushed, old)

  def select_field(new: Array, old: Array) -> Array:
    return jnp.where(ok.reshape(-1, *[1] * (new.ndim - 1)), new, old)

  advanced = History(
    step=step,
    skipped=history.skipped + (~ok).astype(jnp.int32),
    total=history.total + changed.astype(jnp.int32),
    steps=push_newest(jnp.broadcast_to(step, level.shape), history.steps),
    levels=push_newest(level.astype(jnp.int32), history.levels),
  )
  selected = {k: select_field(v, getattr(old, k)) for k, v in fields.items()}
  new: _State = old._replace(history=advanced, **selected)
  return new


def check_signal(name: str, signal: Any, groups: int | None = None) -> Array:
  """Returns a signal as float32[groups]; raises unless it has that shape."""
  try:
    signal = jnp.asarray(signal)
  except (OverflowError, TypeError, ValueError):
    raise TypeError(
      f"`{name}` must be an array of numbers, got {signal!r:.200}."
    ) from None
  kinds = (jnp.floating, jnp.integer)
  if not any(jnp.issubdtype(signal.dtype, kind) for kind in kinds):
    raise TypeError(
      f"`{name}` must be an array of numbers, got {core.shape_string(signal)}."
    )
  if signal.ndim != 1 or not signal.size or groups not in (None, signal.size):
    span = "groups" if groups is None else str(groups)
    raise ValueError(
      f"`{name}` must be float32[{span}], got {core.shape_string(signal)}."
    )
  return signal.astype(jnp.float32)


def state_of(cls: type[Any] = tuple) -> core.Kind:
  """Makes the kind of states of a controller, of one class."""
  source = "what `init` or the last `update` returned"

  def check(name: str, state: Any) -> Any:
    core.instance(cls, source)(name, state)
    core.instance(History, source)(name, getattr(state, "history", None))
    shape = jnp.shape(state.history.levels)
    of_groups = jax.tree.leaves(state._replace(history=state.history[1:]))
    if (
      len(shape) != 2
      or jnp.shape(state.history.steps) != shape
      or any(jnp.shape(x)[:1] != shape[:1] for x in of_groups)
    ):
      shapes = jax.tree.map(jnp.shape, tuple(state))
      raise ValueError(f"`{name}` must be {source}, got shapes {shapes}.")
    return state

  return check


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

    One of your own, which rises once the signal is small, and stays there:

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True)
    ... class rise_once(controllers.Controller):
    ...   below: float
    ...   def init(self, signal):
    ...     return jnp.zeros(signal.shape, jnp.int32)
    ...   def update(self, signal, state):
    ...     return jnp.where(signal < self.below, 1, state)
    ...   def level(self, state):
    ...     return state
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

  @core.declare(state=state_of())
  def level(self, state: Any) -> Array:
    """Returns the level of every group, int32[groups]; 0 is the fewest bits.

    Args:
      state: what `init` or `update` returned.
    """
    level: Array = state.history.level
    return level


class FixedState(NamedTuple):
  """State of the `fixed` controller: the history of its one level."""

  history: History


@dataclasses.dataclass(frozen=True)
@core.declare(at=core.integer(0, 2**31 - 1))
class fixed(Controller):
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

  @core.declare(signal=core.arrays)
  def init(self, signal: PyTree) -> FixedState:
    """Returns the state of the one level, for float32[groups] leaves."""
    shapes = {jnp.shape(x) for x in jax.tree.leaves(signal)}
    if len(shapes) != 1 or len(min(shapes)) != 1:
      raise ValueError(
        f"`signal` must be arrays float32[groups], got shapes {sorted(shapes)}."
      )
    ((groups,),) = shapes
    return FixedState(start_history(groups, self.at, 1))

  @core.declare(state=state_of(FixedState))
  def update(self, signal: PyTree, state: FixedState) -> FixedState:
    """Returns the state after a step of any signal, at the same level."""
    del signal
    level = state.history.level
    return advance_state(state, level, jnp.full_like(level, True, bool))
