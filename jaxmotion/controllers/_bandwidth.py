"""Controller that picks the most bits whose transfer the computation hides."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.controllers import _base
from jaxmotion.core import Array


class Times(NamedTuple):
  """Measured times of a step, the signal of `bandwidth`.

  Attributes:
    transfer: float32[groups], seconds of the transfer at the present level.
    compute: float32[groups], seconds of the computation that can hide it.

  Example:
    >>> times = Times(transfer=jnp.array([0.01]), compute=jnp.array([0.1]))
    >>> bool((times.transfer < times.compute).all())  # The transfer is hidden.
    True
  """

  transfer: Array
  compute: Array


_TIMES = core.instance(Times, "the Times of a step")


class BandwidthState(NamedTuple):
  """State of the `bandwidth` controller."""

  history: _base.History
  seconds_per_byte: Array  # float32[groups], smoothed, of transfer.
  compute: Array  # float32[groups], smoothed seconds of computation.
  measured: Array  # int32[groups], number of steps that were measured.
  # int32[groups], consecutive updates with time for a higher level.
  streak: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  level_bytes=core.sequence("integers", core.integer(1, 1 << 62)),
  decay=core.number(0, 1, open_high=True),
  margin=core.number(0, 1, open_low=True),
  patience=core.integer(1, _base.MAX_UPDATES),
  history_size=core.integer(1, _base.MAX_SLOTS),
)
class bandwidth(_base.Controller):
  """Picks the highest level whose transfer the computation hides.

  Precision is free as long as the step does not wait for the transfer. For
  every group, with smoothed times, transfer(l) = seconds_per_byte bytes(l):

    hidden = highest l with transfer(l) <= compute, or 0
    spare  = highest l with transfer(l) <= margin compute, or 0
    if hidden < level: level = hidden, streak = 0
    else if spare > level: streak += 1, otherwise streak = 0
    if streak == patience: level = spare, streak = 0

  The level falls at once, and rises only with time to spare. It starts at 0.
  One group with the times of a whole step serves parameters that share a link.
  Times that are negative or not finite are skipped.

  Args:
    level_bytes: bytes that each level moves, rising. Only their ratios matter,
      so the bytes of one element will do. A transfer's time is assumed to be
      proportional to them.
    decay: weight of the past in the smoothed times, in [0, 1).
    margin: fraction of the computation that a higher level may fill, in (0, 1].
    patience: number of consecutive updates before the level rises.
    history_size: number of level changes that are held, the start included.

  Raises:
    TypeError, ValueError: an argument outside its range.

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
    if not self.level_bytes or list(self.level_bytes) != sorted(
      set(self.level_bytes)
    ):
      raise ValueError(
        f"`level_bytes` must rise from level to level, got {self.level_bytes}."
      )

  @core.declare(signal=_TIMES)
  def init(self, signal: Times) -> BandwidthState:
    """Returns the state before training, at level 0, for as many groups."""
    groups = _base.check_signal("signal.transfer", signal.transfer).shape[0]
    # Arrays of their own: a step that donates the state donates each once.
    return BandwidthState(
      history=_base.start_history(groups, 0, self.history_size),
      seconds_per_byte=jnp.zeros((groups,), jnp.float32),
      compute=jnp.zeros((groups,), jnp.float32),
      measured=jnp.zeros((groups,), jnp.int32),
      streak=jnp.zeros((groups,), jnp.int32),
    )

  @core.declare(signal=_TIMES, state=_base.state_of(BandwidthState))
  def update(self, signal: Times, state: BandwidthState) -> BandwidthState:
    """Returns the state after a step that took these times."""
    groups = state.measured.shape[0]
    transfer = _base.check_signal("signal.transfer", signal.transfer, groups)
    compute = _base.check_signal("signal.compute", signal.compute, groups)
    low, high = jnp.minimum(transfer, compute), jnp.maximum(transfer, compute)
    ok = (low >= 0) & jnp.isfinite(high)
    now = state.history.level
    level_bytes = jnp.asarray(self.level_bytes, jnp.float32)

    def smooth_time(old: Array, new: Array) -> Array:
      mean = self.decay * old + (1 - self.decay) * new
      return jnp.where(state.measured > 0, mean, new)

    seconds_per_byte = smooth_time(
      state.seconds_per_byte, transfer / level_bytes[now]
    )
    compute = smooth_time(state.compute, compute)

    def highest_level(limit: Array) -> Array:
      fits = seconds_per_byte[:, None] * level_bytes[None, :] <= limit[:, None]
      return jnp.maximum(jnp.sum(fits, axis=1, dtype=jnp.int32) - 1, 0)

    hidden = highest_level(compute)
    spare = highest_level(self.margin * compute)
    streak = jnp.where(spare > now, state.streak + 1, 0)
    rises = streak == self.patience
    level = jnp.where(rises, spare, jnp.minimum(hidden, now))
    return _base.advance_state(
      state,
      level,
      ok,
      seconds_per_byte=seconds_per_byte,
      compute=compute,
      measured=state.measured + 1,
      streak=jnp.where(rises, 0, streak),
    )
