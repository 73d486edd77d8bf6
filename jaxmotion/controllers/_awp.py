"""Controller that raises precision when the norm of the weights falls."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.controllers import _base
from jaxmotion.core import Array


class AwpState(NamedTuple):
  """State of the `awp` controller."""

  history: _base.History
  counter: Array  # int32[groups], updates below the threshold.
  reference: Array  # float32[groups], what the next norm is compared with.
  norms: Array  # float32[groups, window], the last norms, newest first.
  num_norms: Array  # int32[groups], of these norms, since the last reset.


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  threshold=core.number(-1),
  interval=core.integer(1, _base.MAX_UPDATES),
  levels=core.integer(1, _base.MAX_SLOTS),
  window=core.integer(1, _base.MAX_SLOTS),
  counter=core.choice(("cumulative", "consecutive")),
  reference=core.choice(("previous", "last_reset")),
)
class awp(_base.Controller):
  """Raises a group's level after `interval` updates of falling norm.

  For every group, with n the norm of its weights:

    delta = (n_b - n_ref) / n_ref            # signed
    if delta < threshold: counter += 1
    if counter == interval: level += 1, counter = 0

  from level 0 up to level `levels` - 1, where it stays. The defaults are the
  paper's rule (AWP, adaptive weight precision). Its constants (threshold,
  interval) are (-0.05, 4000) for each layer of AlexNet, (-0.002, 4000) for each
  of VGG, and (-2e-5, 2000) for each building block of a ResNet. A reference of
  zero has no relative change: it is replaced and not counted.

  Args:
    threshold: relative change below which a norm counts as falling, such as
      -2e-3.
    interval: number of counted updates until the level changes.
    levels: number of levels; the caller has one codec for each (in the paper 4,
      of 8 to 32 bits).
    window: number of last norms whose mean is n_b (of all norms, while there
      are fewer).
    counter: "cumulative", or "consecutive", which resets the counter when
      delta >= threshold.
    reference: "previous" compares with the n of the update before.
      "last_reset" compares with the first norm after the start or after the
      last full counter. That norm is not counted itself, so delta is the drift
      since. It suits norms of truncated weights, which jump when the level
      changes.

  Raises:
    TypeError, ValueError: an argument outside its range.

  Example:
    >>> controller = awp(threshold=-0.1, interval=2)
    >>> state = controller.init(jnp.array([4.0, 4.0]))
    >>> for norms in ([3.0, 3.9], [2.0, 3.8]):
    ...   state = controller.update(jnp.array(norms), state)
    >>> controller.level(state).tolist()
    [1, 0]

  References:
    Zhuang, Malossi and Casas, *Reducing Data Motion to Accelerate the Training
    of Deep Neural Networks*, 2020 (the adaptive weight precision).
  """

  threshold: float
  interval: int
  levels: int = 4
  window: int = 1
  counter: str = "cumulative"
  reference: str = "previous"

  @core.declare(signal=_base.check_signal)
  def init(self, signal: Array) -> AwpState:
    """Returns the state before training, from norms of the first weights."""
    groups = signal.shape[0]
    ok = jnp.isfinite(signal)
    norms = jnp.where(ok, signal, 0.0)
    zeros = jnp.zeros((groups,), jnp.int32)
    return AwpState(
      # Levels only rise, so a history of `levels` changes holds all of them.
      history=_base.start_history(groups, 0, self.levels),
      counter=zeros,
      reference=norms,
      norms=jnp.zeros((groups, self.window), jnp.float32).at[:, 0].set(norms),
      num_norms=ok.astype(jnp.int32),
    )

  @core.declare(state=_base.state_of(AwpState))
  def update(self, signal: Array, state: AwpState) -> AwpState:
    """Returns the state after a step, from norms of the weights after it."""
    norm = _base.check_signal("signal", signal, state.counter.shape[0])
    ok = jnp.isfinite(norm)
    norms = jnp.concatenate([norm[:, None], state.norms[:, :-1]], axis=1)
    num_norms = jnp.minimum(state.num_norms + 1, self.window)
    # The mean of each group's newest norms, which come first.
    is_valid = jnp.arange(norms.shape[1])[None, :] < num_norms[:, None]
    total = jnp.sum(jnp.where(is_valid, norms, 0.0), axis=1)
    mean = total / num_norms.astype(jnp.float32)

    known = (state.num_norms > 0) & (state.reference > 0)
    delta = (mean - state.reference) / state.reference
    falls = known & (delta < self.threshold)
    old_counter = state.counter
    if self.counter == "consecutive":
      old_counter = jnp.where(falls, old_counter, 0)
    counter = old_counter + falls.astype(jnp.int32)
    is_full = counter == self.interval
    now = state.history.level
    level = jnp.minimum(now + is_full.astype(jnp.int32), self.levels - 1)

    reference = mean
    if self.reference == "last_reset":
      reference = jnp.where(known, state.reference, mean)
      num_norms = jnp.where(is_full, 0, num_norms)
    return _base.advance_state(
      state,
      level,
      ok,
      counter=jnp.where(is_full, 0, counter),
      reference=reference,
      norms=norms,
      num_norms=num_norms,
    )
