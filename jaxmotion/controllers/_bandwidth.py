"""The most bits whose transfer hides behind the computation."""

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


class Times(NamedTuple):
  """What `bandwidth` is told of a step.

  Attributes:
    transfer: float32[groups], seconds that the transfer took at the present
      level.
    compute: float32[groups], seconds of computation it can hide behind.
  """

  transfer: Array
  compute: Array


class BandwidthState(NamedTuple):
  """State of `bandwidth`.

  Attributes:
    history: the levels so far.
    pace: float32[groups], smoothed seconds of transfer a byte.
    compute: float32[groups], smoothed seconds of computation.
    seen: int32[groups], steps that were measured.
    calm: int32[groups], updates in a row that had room for a higher level.
  """

  history: History
  pace: Array
  compute: Array
  seen: Array
  calm: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class bandwidth(Controller):
  """Picks the highest level whose transfer the computation hides.

  Precision is free as long as the transfer is not what a step waits for. For
  every group, with smoothed times, transfer(l) = pace bytes(l):

    least = highest l with transfer(l) <= compute, or 0
    most  = highest l with transfer(l) <= margin compute, or 0
    if least < level: level = least, calm = 0
    else if most > level: calm += 1, otherwise calm = 0
    if calm == patience: level = most, calm = 0

  Down at once, up only with room to spare. It starts at level 0. One group
  with the times of a whole step serves parameters that share a link. Times
  that are negative or not finite are skipped.

  Args:
    level_bytes: bytes that each level moves, rising; only their ratios matter,
      so the bytes of one value will do. A transfer's time is taken to be
      proportional to them.
    decay: weight of the past in the smoothed times, in [0, 1).
    margin: share of the computation that a higher level may fill, in (0, 1].
    patience: updates in a row before it goes up.
    history_size: how many switches are remembered, the start included.

  Raises:
    TypeError, ValueError: an argument that is none of these.

  Example:
    >>> controller = bandwidth(level_bytes=(1, 2, 4), decay=0.0, patience=1)
    >>> state = controller.init(Times(jnp.zeros(1), jnp.zeros(1)))
    >>> levels = []
    >>> for transfer in (0.1, 0.2, 0.6):
    ...   times = Times(jnp.array([transfer]), jnp.array([0.3]))
    ...   state = controller.update(times, state)
    ...   levels += controller.level(state).tolist()
    >>> levels
    [1, 1, 0]
  """

  level_bytes: tuple[int, ...]
  decay: float = 0.9
  margin: float = 0.9
  patience: int = 10
  history_size: int = 64

  def __post_init__(self) -> None:
    object.__setattr__(self, "level_bytes", tuple(self.level_bytes))
    for count in self.level_bytes:
      check_int("level_bytes", count, 1)
    if not self.level_bytes or list(self.level_bytes) != sorted(
      set(self.level_bytes)
    ):
      raise ValueError(
        f"`level_bytes` must rise from level to level, got {self.level_bytes}."
      )
    check_number("decay", self.decay, 0, 1, open_high=True)
    check_number("margin", self.margin, 0, 1, open_low=True)
    check_int("patience", self.patience, 1)
    check_int("history_size", self.history_size, 1)

  def init(self, signal: Times) -> BandwidthState:
    """Returns the state for as many groups as the times have."""
    groups = check_signal("signal.transfer", signal.transfer).shape[0]
    times, counts = (
      jnp.zeros((groups,), dtype) for dtype in (jnp.float32, jnp.int32)
    )
    return BandwidthState(
      history=start_history(groups, 0, self.history_size),
      pace=times,
      compute=times,
      seen=counts,
      calm=counts,
    )

  def update(self, signal: Times, state: BandwidthState) -> BandwidthState:
    """Returns the state after a step that took these times."""
    groups = state.seen.shape[0]
    transfer = check_signal("signal.transfer", signal.transfer, groups)
    compute = check_signal("signal.compute", signal.compute, groups)
    least, most = jnp.minimum(transfer, compute), jnp.maximum(transfer, compute)
    ok = (least >= 0) & jnp.isfinite(most)
    now = state.history.level
    level_bytes = jnp.asarray(self.level_bytes, jnp.float32)

    def smooth(old: Array, new: Array) -> Array:
      mean = self.decay * old + (1 - self.decay) * new
      return jnp.where(state.seen > 0, mean, new)

    pace = smooth(state.pace, transfer / level_bytes[now])
    compute = smooth(state.compute, compute)

    def highest(limit: Array) -> Array:
      fits = pace[:, None] * level_bytes[None, :] <= limit[:, None]
      return jnp.maximum(jnp.sum(fits, axis=1, dtype=jnp.int32) - 1, 0)

    hidden, roomy = highest(compute), highest(self.margin * compute)
    calm = jnp.where(roomy > now, state.calm + 1, 0)
    up = calm == self.patience
    level = jnp.where(up, roomy, jnp.minimum(hidden, now))
    new = BandwidthState(
      history=advance_history(state.history, level, ok),
      pace=pace,
      compute=compute,
      seen=state.seen + 1,
      calm=jnp.where(up, 0, calm),
    )
    return BandwidthState(new.history, *select_groups(ok, new[1:], state[1:]))
