"""Calls of a trainer: `join`, and `step` after each inner step."""

import hashlib
import logging
import time
import uuid
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

from jaxmotion import codecs, core
from jaxmotion.core import PyTree
from jaxmotion.islands import _store
from jaxmotion.islands._follower import Follower, Rules, Sent
from jaxmotion.islands._job import JobFollower
from jaxmotion.islands._outer_step import (
  Agreed,
  Contribution,
  OuterStep,
  make_outer_step,
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


class Island:
  """One of the islands that train a model together; `join` makes it.

  Attributes:
    name: name of the island.

  Example:
    >>> import tempfile, optax
    >>> from jaxmotion import codecs, islands
    >>> params = {"w": jnp.zeros(2)}
    >>> outer, codec = optax.sgd(1.0), codecs.identity()
    >>> folder = tempfile.mkdtemp()
    >>> island = islands.join(folder, params, outer, codec=codec, every=1)
    >>> params = island.start()
    >>> params = island.step({"w": params["w"] + 1})
    >>> params["w"].tolist(), island.round
    ([1.0, 1.0], 1)
    >>> island.stop()
  """

  def __init__(
    self,
    outer_step: OuterStep,
    follower: Follower | JobFollower,
    every: int,
    delay: int,
    grace_s: float,
  ):
    """Makes an island whose follower has joined the run."""
    self.name = follower.name
    self._outer_step, self._follower = outer_step, follower
    self._every, self._delay, self._grace_s = every, delay, grace_s
    self._states = outer_step.init_states()
    self._landed: Agreed = follower.read_agreed()[0]
    self._flight: _Flight | None = None
    self._steps, self._tokens = 0, 0.0  # Since the last change was sent.
    self._is_started = False

  @property
  def round(self) -> int:
    """Number of rounds that this island's parameters have seen."""
    return self._landed.round

  @property
  def anchor(self) -> PyTree:
    """The parameters on which the islands agreed last: evaluate and save them.

    They have the same bits on all islands in the same round.
    """
    return jax.tree.map(jnp.copy, self._landed.anchor)

  def start(self) -> PyTree:
    """Begins to take part; returns the parameters to start with.

    They are the anchor of the newest round. Every island starts with those of
    the first one, whatever it gave to `join`.
    """
    if not self._is_started:
      self._follower.start()
      self._is_started = True
    return self.anchor

  @core.declare(
    params=core.typed_arrays,
    tokens=core.measured(core.number(0, 2**31, open_low=True)),
  )
  def step(self, params: PyTree, tokens: float = 1) -> PyTree:
    """Takes part in the run; call it after each step of the inner optimizer.

    Most calls return what they are given. After `every` calls the change since
    the anchor is sent. Once a round is decided, a call moves the parameters: to
    the new anchor, plus what they have changed and not yet sent.

    Args:
      params: this island's parameters, of the shapes that `join` was given.
        They may be sharded over devices, also of the other processes of a job.
      tokens: weight of this step in the mean over islands, more than 0.

    Returns:
      The parameters to go on with, placed like `params`.

    Raises:
      TypeError: a leaf is no array.
      ValueError: `params` have other shapes than those of the run.
      RuntimeError: `start` was not called, or the island's thread failed.
    """
    if not self._is_started:
      raise RuntimeError(
        "`step` must come between `start`, whose parameters training begins "
        "with, and `stop`."
      )
    if not core.same_shapes(params, self._outer_step.params_like):
      raise ValueError(
        "`params` must be like those that `start` returned, got "
        f"{core.shape_strings(params)}."
      )
    self._steps += 1
    self._tokens += tokens
    longest = self._every if self._flight is None else self._delay
    # Processes of a job wait for one another in each look at the run.
    if self._steps >= longest or isinstance(self._follower, Follower):
      params = self._land(params)
    if self._flight is None and self._steps >= self._every:
      params = self._send(params)
    if (flight := self._flight) is not None and self._steps >= self._delay:
      wait_s = flight.deadline_s - time.monotonic()
      self._follower.wait_round(flight.sent.round, wait_s)
      params = self._land(params)
    return params

  def stop(self) -> None:
    """Leaves the run; a change that was not sent yet is lost."""
    self._is_started = False
    self._follower.stop()

  def _land(self, params: PyTree) -> PyTree:
    """Moves parameters to the newest anchor, if there is a newer one."""
    agreed, refused_digest = self._follower.read_agreed()
    if agreed.round == self._landed.round:
      return params
    base = self._landed.anchor
    if (flight := self._flight) is not None:
      if agreed.counted.get(self.name) == flight.sent.digest:
        base, self._states = flight.params, flight.states
      elif refused_digest == flight.sent.digest:
        base = flight.params
        _LOG.warning("%s: the run refused a change, which is lost", self.name)
      else:
        # The round was decided without it: it is a part of the next change.
        self._tokens += flight.tokens
        self._steps += self._every
    self._landed, self._flight = agreed, None
    return move_params(
      _place_like(agreed.anchor, params), params, _place_like(base, params)
    )

  def _send(self, params: PyTree) -> PyTree:
    """Sends the change since the anchor, unless it is not finite."""
    agreed = self._landed
    # XLA cannot divide all codecs over devices: one encodes.
    whole = jax.device_put(_gather(params), jax.local_devices()[0])
    payloads, states, is_finite = self._outer_step.encode(
      agreed, whole, self._states, self.name
    )
    if not is_finite:
      _LOG.warning("%s: begins at the anchor again: not finite", self.name)
      self._steps, self._tokens = 0, 0.0
      return jax.tree.map(jnp.copy, _place_like(agreed.anchor, params))
    own = Contribution(self.name, self._tokens, jax.device_get(payloads))
    data = self._outer_step.pack(agreed, own)
    self._flight = _Flight(
      Sent(agreed.round, data, hashlib.sha256(data).hexdigest()),
      # The trainer may donate its own.
      jax.tree.map(jnp.copy, params),
      states,
      self._tokens,
      time.monotonic() + 2 * self._grace_s,
    )
    self._steps, self._tokens = 0, 0.0
    self._follower.send(self._flight.sent)
    return params


def _check_params(name: str, value: Any) -> Any:
  """Returns a tree of concrete floating-point arrays, or raises."""
  if not jax.tree.leaves(value):
    raise ValueError(f"`{name}` must hold an array, got {value!r:.80}.")
  for path, leaf in core.named_leaves(value):
    core.float_array(f"{name}/{path}", leaf)
    if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
      raise TypeError(
        f"`{name}` must be arrays with values, got {leaf!r:.80}: call `join` "
        "outside of jitted functions."
      )
  return value


@core.declare(
  params=_check_params,
  outer=core.instance(optax.GradientTransformation, "an optax transformation"),
  every=core.integer(1, 2**31 - 1),
  delay=core.integer(0, 2**31 - 1),
  name=core.optional(_store.check_island),
  quorum=core.integer(1, 2**31 - 1),
  grace_s=core.measured(core.number(0, 1e9, open_low=True)),
  max_norm=core.optional(core.measured(core.number(0, open_low=True))),
)
def join(
  store: Any,
  params: PyTree,
  outer: optax.GradientTransformation,
  *,
  codec: codecs.Codec,
  every: int,
  delay: int = 0,
  name: str | None = None,
  quorum: int = 1,
  grace_s: float = 60.0,
  max_norm: float | None = None,
) -> Island:
  r"""Joins a run of islands, which train one model through an object store.

  An island is a process that trains by itself (local SGD, DiLoCo), or a JAX job
  of several. Now and then it puts its change since the anchor into the store,
  encoded by a codec. When all islands have, or the grace is over, one of them
  commits the round. All then take the mean of the changes that it lists,

  .. math:: d = \sum_r t_r \; decode(encode(a - p_r)) / \sum_r t_r

  as the gradient of `outer`, which moves the anchor a. Islands come and go, and
  none is special. Who is late, or joins later, goes on at the newest anchor and
  keeps what it has changed and not yet sent. If the store cannot be reached, an
  island trains on by itself.

  Of a JAX job of several processes, all call `join`, `start`, `step` and `stop`
  together. The first one talks to the store, and sends what it reads to the
  others. Each holds the whole model on one device to encode. A job looks for a
  new round only in steps that send a change or may wait.

  An island holds its parameters, the anchor, the outer state, and a copy of the
  parameters while a change is sent. It reads the changes of all others, one
  after the other. The mean is compiled once for each number of changes.

  With equal tokens, nobody missing and no delay, the result has the bits of
  `local_updates` with `exchange(..., method="gather")`. Tests check it on CPU
  for `uniform` and `topk`, with feedback. With `sign`, last bits differ, since
  XLA compiles other programs for it. Unequal tokens weigh changes after they
  are decoded.

  Args:
    store: folder of the run, its URL (`s3://`, `gs://`, `az://`), or a store of
      obstore. Every run needs its own, and all islands the same one.
    params: pytree of floating-point arrays. Those of the first island begin the
      run; of others the shapes are read. They are no more needed after the
      call.
    outer: optimizer of the anchor, such as `optax.sgd(0.7, momentum=0.9,
      nesterov=True)`, the same on all islands, without an exchange.
    codec: codec of the changes, the same on all islands. Its error memory is
      this island's own, and keeps nothing of a change that was not accepted.
    every: number of steps between two changes that are sent. It may differ
      between islands.
    delay: number of steps that go on after a change was sent before `step`
      waits for the round. With 0 it waits at once.
    name: name of the island, 1 to 64 letters, digits, `_` or `-`. None makes
      one. Two living islands must not have the same.
    quorum: least number of contributions to a round.
    grace_s: seconds that a round with a quorum waits for other islands. An
      island that gave no sign for as long is not waited for. `step` waits for
      twice as long at most, then trains on.
    max_norm: largest L2 norm of a change that is accepted; None has no limit.

  Returns:
    The island. `params = island.start()` has the parameters to begin with, and
    `params = island.step(params)` comes after each step of the trainer.

  Raises:
    ImportError: obstore is missing: `pip install 'jaxmotion[islands]'`.
    TypeError: an argument of another type, such as a `codec` of none.
    ValueError: a `name` with other characters; a codec with rounds of its own,
      or whose memory needs the mean; a run of another model or codec.
    StoreError: the store cannot be reached.

  Example:
    >>> import tempfile, optax
    >>> from jaxmotion import codecs
    >>> params = {"w": jnp.zeros(4)}
    >>> outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    >>> folder, codec = tempfile.mkdtemp(), codecs.uniform(bits=8)
    >>> island = join(folder, params, outer, codec=codec, every=2)
    >>> params = island.start()
    >>> for _ in range(4):
    ...   params = jax.tree.map(lambda p: p + 0.1, params)  # Your step.
    ...   params = island.step(params)
    >>> island.round
    2
    >>> island.stop()

  References:
    Douillard et al., *DiLoCo*, arXiv 2311.08105, 2023.
  """
  outer_step = make_outer_step(params, outer, codec, max_norm)
  # On the host, so that the run is not bound to the trainer's devices.
  anchor = jax.tree.map(np.asarray, _gather(params))
  follower: Any = None
  if jax.process_index() == 0:
    # Beside the arrays, there is a header.
    likes = outer_step.agreed_likes, outer_step.payload_likes
    opened = _store.Store(store, core.tree_bytes(likes) + (1 << 20))
    name, rules = name or uuid.uuid4().hex[:12], Rules(quorum, grace_s)
    follower = Follower(opened, outer_step, name, rules)
    follower.join_run(outer_step.agree(0, anchor, outer.init(anchor)))
  if jax.process_count() > 1:
    follower = JobFollower(follower, outer_step)
  return Island(outer_step, follower, every, delay, grace_s)


def _gather(tree: PyTree) -> PyTree:
  """Returns arrays that this process has whole."""
  return jax.tree.map(
    lambda x: (
      x
      if core.is_local(x)
      else multihost_utils.process_allgather(x, tiled=True)
    ),
    tree,
  )


def _place_like(tree: PyTree, params: PyTree) -> PyTree:
  """Places arrays on the devices of parameters."""

  def place_leaf(x: Any, like: Any) -> Any:
    if not isinstance(like, jax.Array):
      return x
    if core.is_local(x) and not core.is_local(like):
      # Each process has the same values, which `device_put` would compare.
      whole = np.asarray(x)
      return jax.make_array_from_callback(
        whole.shape, like.sharding, lambda index: whole[index]
      )
    return jax.device_put(x, like.sharding)

  return jax.tree.map(place_leaf, tree, params)
