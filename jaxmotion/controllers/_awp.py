"""Precision that grows when the weights' norm falls."""

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
from jaxmotion.core import Array, check_choice, check_int, check_number


class AwpState(NamedTuple):
  """State of `awp`.

  Attributes:
    history: the levels so far.
    counter: int32[groups], updates below the threshold.
    reference: float32[groups], the norm that the next one is compared with.
    norms: float32[groups, window], the last norms, newest first.
    seen: int32[groups], how many of them there are since the last reset.
  """

  history: History
  counter: Array
  reference: Array
  norms: Array
  seen: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class awp(Controller):
  """Raises a group's level after `interval` updates of falling norm.

  For every group, with n the norm of its weights:

    delta = (n_b - n_ref) / n_ref            # signed
    if delta < threshold: counter += 1
    if counter == interval: level += 1, counter = 0

  from level 0 up to level `levels` - 1, where it stays. The defaults are the
  paper's rule; `AWP_ALEXNET`, `AWP_VGG` and `AWP_RESNET` have its constants.
  A reference of zero has no relative change: it is replaced and not counted.

  Args:
    threshold: what counts as falling, e.g. -2e-3.
    interval: updates until a switch.
    levels: number of levels; the caller's ladder has as many rungs (4 of 8
      bits each in the paper).
    window: n_b is the mean of this many last norms (of all, while there are
      fewer).
    counter: "cumulative", or "consecutive": zero again when
      delta >= threshold.
    reference: "previous": n_ref is the n of the update before.
      "last_reset": that of the start, and after each full counter the first
      one to come, which is not counted itself: n_b is then the drift since.
      It suits norms of the weights as they travel, which jump at a switch.

  Raises:
    TypeError, ValueError: an argument that is none of these.

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

  def __post_init__(self) -> None:
    check_number("threshold", self.threshold, -1)
    check_int("interval", self.interval, 1)
    check_int("levels", self.levels, 1)
    check_int("window", self.window, 1)
    check_choice("counter", self.counter, ("cumulative", "consecutive"))
    check_choice("reference", self.reference, ("previous", "last_reset"))

  def init(self, signal: Array) -> AwpState:
    """Returns the state for the norms of the weights before training."""
    norms = check_signal("signal", signal)
    groups = norms.shape[0]
    ok = jnp.isfinite(norms)
    norms = jnp.where(ok, norms, 0.0)
    zeros = jnp.zeros((groups,), jnp.int32)
    return AwpState(
      # No level is left twice, so this holds them all.
      history=start_history(groups, 0, self.levels),
      counter=zeros,
      reference=norms,
      norms=jnp.zeros((groups, self.window), jnp.float32).at[:, 0].set(norms),
      seen=ok.astype(jnp.int32),
    )

  def update(self, signal: Array, state: AwpState) -> AwpState:
    """Returns the state after a step that left weights of these norms."""
    groups = state.counter.shape[0]
    norm = check_signal("signal", signal, groups)
    ok = jnp.isfinite(norm)
    norms = jnp.concatenate([norm[:, None], state.norms[:, :-1]], axis=1)
    seen = jnp.minimum(state.seen + 1, self.window)
    mean = self._mean(norms, seen)

    known = (state.seen > 0) & (state.reference > 0)
    delta = (mean - state.reference) / state.reference
    falls = known & (delta < self.threshold)
    kept = state.counter
    if self.counter == "consecutive":
      kept = jnp.where(falls, kept, 0)
    counter = kept + falls.astype(jnp.int32)
    full = counter == self.interval
    now = state.history.level
    level = jnp.minimum(now + full.astype(jnp.int32), self.levels - 1)

    reference = mean
    if self.reference == "last_reset":
      reference = jnp.where(known, state.reference, mean)
      seen = jnp.where(full, 0, seen)
    new = state._replace(
      counter=jnp.where(full, 0, counter),
      reference=reference,
      norms=norms,
      seen=seen,
    )
    history = advance_history(state.history, level, ok)
    rest = select_groups(ok, new[1:], state[1:])
    return AwpState(history, *rest)

  def _mean(self, norms: Array, seen: Array) -> Array:
    there = jnp.arange(self.window)[None, :] < seen[:, None]
    total = jnp.sum(jnp.where(there, norms, 0.0), axis=1)
    return total / seen.astype(jnp.float32)


_PRESETS = {
  "alexnet": awp(threshold=-5e-2, interval=4000),
  "resnet": awp(threshold=-2e-5, interval=2000),
  "vgg": awp(threshold=-2e-3, interval=4000),
}


def awp_preset(network: str) -> awp:
  """Returns `awp` with the paper's constants for a kind of network.

  Args:
    network: "alexnet" or "vgg", of which each layer is a group, or "resnet",
      of which each building block is a group.

  Raises:
    ValueError: the paper has no constants for this network.

  Example:
    >>> awp_preset("vgg").threshold
    -0.002
  """
  check_choice("network", network, tuple(_PRESETS))
  return _PRESETS[network]
