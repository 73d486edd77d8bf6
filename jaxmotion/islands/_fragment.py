"""One fragment of an island's parameters, and its own rounds in the store."""

import hashlib
import logging
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxmotion import core
from jaxmotion.core import PyTree
from jaxmotion.islands._follower import Follower, Sent
from jaxmotion.islands._job import JobFollower
from jaxmotion.islands._outer_step import (
  Agreed,
  Contribution,
  OuterStep,
  move_params,
)

_LOG = logging.getLogger("jaxmotion.islands")


class _Flight(NamedTuple):
  """A change that was sent, until its round is decided."""

  sent: Sent
  params: PyTree  # As they were when it was sent.
  states: list[PyTree]  # Of the codec, if the change is accepted.
  tokens: float
  deadline_s: float  # Until when a step waits for the round.


class Schedule(NamedTuple):
  """When a fragment is sent, and how long a step waits for it."""

  every: int  # Steps between two changes that are sent.
  delay: int  # Steps that go on before a step waits for the round.
  grace_s: float  # Seconds; a step waits twice as long at most.


class Fragment:
  """Sends the changes of a fragment, and moves it to the anchors of rounds."""

  def __init__(
    self,
    outer_step: OuterStep,
    follower: Follower | JobFollower,
    schedule: Schedule,
    first_steps: int,
  ):
    """Makes a fragment, which is sent first after a number of steps."""
    self._outer_step, self.follower = outer_step, follower
    self._schedule, self._name = schedule, follower.name
    # Committed as its later states are, so that one program encodes all.
    self._states = _place_whole(outer_step.init_states())
    self.landed: Agreed = follower.read_agreed()[0]
    self._flight: _Flight | None = None
    # Since the last change was sent.
    self._steps, self._tokens = schedule.every - first_steps, 0.0

  def step(self, params: PyTree, tokens: float) -> PyTree | None:
    """Returns the parameters to go on with; None if they are not finite."""
    every, delay, _ = self._schedule
    self._steps += 1
    self._tokens += tokens
    longest = every if self._flight is None else delay
    # Processes of a job wait for one another in each look at the run.
    if self._steps >= longest or isinstance(self.follower, Follower):
      params = self._land(params)
    is_due = self._flight is None and self._steps >= every
    if is_due and not self._send(params):
      return None
    if (flight := self._flight) is not None and self._steps >= delay:
      wait_s = flight.deadline_s - time.monotonic()
      self.follower.wait_round(flight.sent.round, wait_s)
      params = self._land(params)
    return params

  def drop_change(self, params: PyTree) -> PyTree:
    """Returns the parameters without what was not sent yet."""
    self._tokens = 0.0
    base = self.landed.anchor if self._flight is None else self._flight.params
    return jax.tree.map(jnp.copy, _place_like(base, params))

  def _land(self, params: PyTree) -> PyTree:
    """Moves parameters to the newest anchor, if there is a newer one."""
    agreed, refused_digest = self.follower.read_agreed()
    if agreed.round == self.landed.round:
      return params
    base = self.landed.anchor
    if (flight := self._flight) is not None:
      if agreed.counted.get(self._name) == flight.sent.digest:
        base, self._states = flight.params, flight.states
      elif refused_digest == flight.sent.digest:
        base = flight.params
        _LOG.warning("%s: the run refused a change, which is lost", self._name)
      else:
        # The round was decided without it: it is a part of the next change.
        self._tokens += flight.tokens
        self._steps += self._schedule.every
    self.landed, self._flight = agreed, None
    return move_params(
      _place_like(agreed.anchor, params), params, _place_like(base, params)
    )

  def _send(self, params: PyTree) -> bool:
    """Sends the change since the anchor; returns False if it is not finite."""
    agreed = self.landed
    payloads, states, is_finite = self._outer_step.encode(
      agreed, _place_whole(gather(params)), self._states, self._name
    )
    if not is_finite:
      _LOG.warning("%s: begins at the anchor again: not finite", self._name)
      self._steps = 0
      return False
    own = Contribution(self._name, self._tokens, jax.device_get(payloads))
    data = self._outer_step.pack(agreed, own)
    self._flight = _Flight(
      Sent(agreed.round, data, hashlib.sha256(data).hexdigest()),
      # The trainer may donate its own.
      jax.tree.map(jnp.copy, params),
      states,
      self._tokens,
      time.monotonic() + 2 * self._schedule.grace_s,
    )
    self._steps, self._tokens = 0, 0.0
    self.follower.send(self._flight.sent)
    return True


def gather(tree: PyTree) -> PyTree:
  """Returns arrays that this process has whole."""
  return jax.tree.map(
    lambda x: (
      x
      if core.is_local(x)
      else multihost_utils.process_allgather(x, tiled=True)
    ),
    tree,
  )


def _place_whole(tree: PyTree) -> PyTree:
  """Places arrays on the device that encodes."""
  # XLA cannot divide all codecs over devices.
  return jax.device_put(tree, jax.local_devices()[0])


def _place_like(tree: PyTree, params: PyTree) -> PyTree:
  """Places arrays on the devices of parameters."""

  def place_leaf(x: Any, like: Any) -> Any:
    # The trainer's step would be compiled again for arrays that are committed
    # to a device, if its own were not.
    if not isinstance(like, jax.Array) or not like.committed:
      return x
    if core.is_local(x) and not core.is_local(like):
      # Each process has the same values, which `device_put` would compare.
      whole = np.asarray(x)
      return jax.make_array_from_callback(
        whole.shape, like.sharding, lambda index: whole[index]
      )
    return jax.device_put(x, like.sharding)

  return jax.tree.map(place_leaf, tree, params)
