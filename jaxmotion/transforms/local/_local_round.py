"""Rounds of local updates: when fragments are sent and when they land."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.collectives.extend import update_params
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _states
from jaxmotion.transforms.local import _fragments


def check_state(state: Any) -> None:
  """Raises unless a scheme's state is that of `local_updates`."""
  core.check_instance(
    "state/opt_state", state, _states.LocalState, "what `init` returned"
  )


class LocalRounds(NamedTuple):
  """Schedule by which workers exchange what they have changed.

  Attributes:
    inner: optimizer of each worker.
    outer: optax chain with an exchange.
    every: steps between two exchanges of a fragment.
    fragments: number of fragments.
    delay: steps between sending and landing.
    mix: share of its own parameters that a worker keeps at a landing.
    parts: (path, shape) -> fragment, or None.
    skips: whether a fragment that is not finite on a worker is not sent.
    is_weighted: whether workers have weights.
  """

  inner: optax.GradientTransformation
  outer: optax.GradientTransformation
  axis_name: AxisName
  every: int
  fragments: int
  delay: int
  mix: float
  parts: _fragments.Parts | None
  skips: bool
  is_weighted: bool

  def divide(self, params: PyTree) -> _fragments.Fragments:
    """Returns the fragments of parameters."""
    return _fragments.divide_leaves(params, self.fragments, self.parts)

  def init(self, params: PyTree) -> _states.LocalState:
    """Makes one worker's state before the first step, inside of a map."""
    divided = self.divide(params)
    own = core.to_varying(params, self.axis_name)
    inner = core.to_varying(self.inner.init(own), self.axis_name)
    if self.fragments > 1:
      # A rule that no leaf matches is an error in the whole tree only.
      jax.eval_shape(self.outer.init, params)
    outer = tuple(
      self.outer.init(divided.mask(params, k)) for k in range(self.fragments)
    )
    flying: PyTree = ()
    if self.delay:
      landing = jax.tree.map(jnp.copy, params)
      flying = landing, jnp.zeros(self.fragments, bool)
    weights: Any = ()
    if self.is_weighted:
      zeros = jnp.zeros(self.fragments, jnp.float32)
      weights = core.pack_worker(core.to_varying(zeros, self.axis_name))
    return _states.LocalState(
      jnp.zeros((), jnp.int32),
      jnp.zeros((), jnp.int32),
      core.pack_worker(own),
      core.pack_worker(inner),
      outer,
      flying,
      weights,
    )

  def finish_step(
    self,
    anchor: PyTree,
    state: _states.LocalState,
    params: core.PerWorker,
    inner: core.PerWorker,
    weight: Array | None,
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, _states.LocalState]:
    """Sends and lands what is due after a step, inside of a map."""
    # `weight`: float32[], this worker's weight in the step, or None.
    divided = self.divide(anchor)
    count = optax.safe_increment(state.count)
    sending = hosts.check_sending(extra_args.get("sending"))
    due = sending.order_branch(self._due_fragment(count, 0))
    # With their leading axis, as XLA copies what passes a branch as a view.
    own, inner_own = params.value, inner.value
    ok = None
    skipped = state.skipped
    if self.skips:
      is_bad, ok = self._check_due(due, divided, own)
      own, inner_own = self._run_if(
        is_bad, self.begin_anew, (own, inner_own), (anchor,)
      )
      skipped = skipped + ((due >= 0) & ~ok).astype(jnp.int32)
    weights = state.weights
    if weight is not None:
      weights = core.unpack_worker(weights) + weight
    outer, flying = list(state.outer), state.flying
    # A conditional for each fragment, of what changes with it alone: XLA copies
    # the results of a switch over all fragments, the whole state, at each step.
    for k in range(self.fragments):
      is_sent = due == k if ok is None else (due == k) & ok
      given = dict(extra_args)
      if self.is_weighted:
        given["weight"] = weights[k]
        weights = weights.at[k].set(jnp.where(is_sent, 0, weights[k]))
      landing = divided.mask(flying[0] if self.delay else anchor, k)
      landing, outer[k] = self._run_if(
        is_sent,
        functools.partial(self._send, given),
        (landing, outer[k]),
        (divided.mask(anchor, k), divided.mask(own, k)),
      )
      is_landing = is_sent
      if self.delay:
        flying = (
          divided.replace(flying[0], landing),
          flying[1].at[k].set(jnp.where(due == k, is_sent, flying[1][k])),
        )
        is_landing = (self._due_fragment(count, self.delay) == k) & flying[1][k]
      moved = self.land(
        is_landing, (divided.mask(anchor, k), divided.mask(own, k)), landing
      )
      anchor = divided.replace(anchor, moved[0])
      own = divided.replace(own, moved[1])
    if self.is_weighted:
      weights = core.pack_worker(weights)
    return anchor, _states.LocalState(
      count,
      skipped,
      core.PerWorker(own),
      core.PerWorker(inner_own),
      tuple(outer),
      flying,
      weights,
    )

  def find_due(self, count: int, offset: int) -> int:
    """Returns the fragment that was sent `offset` steps ago; -1 for none."""
    gap = self.every // self.fragments
    since = count - offset
    is_due = since > 0 and since % gap == 0
    return (since // gap - 1) % self.fragments if is_due else -1

  def find_change(self, anchor: PyTree, own: PyTree) -> PyTree:
    """Returns how far this worker went from the anchor, inside of a map."""
    return jax.tree.map(
      lambda a, p: core.to_varying(a, self.axis_name) - p, anchor, own
    )

  def is_bad(self, own: PyTree) -> Array:
    """Returns whether this worker's parameters are not finite."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(own)]
    return core.to_varying(~jnp.stack(finite).all(), self.axis_name)

  def agree(self, is_bad: Array) -> Array:
    """Returns whether no worker's parameters are bad: a sum of 4 bytes."""
    return lax.psum(is_bad.astype(jnp.int32), self.axis_name) == 0

  def begin_anew(
    self, values: tuple[PyTree, PyTree], anchor: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Lets this worker begin at the anchor, as its parameters are bad."""
    # Its moments would make the next parameters non-finite again.
    # Returns new `values`.
    del values
    start = core.to_varying(anchor, self.axis_name)
    inner = core.to_varying(self.inner.init(start), self.axis_name)
    return core.pack_worker(start).value, core.pack_worker(inner).value

  def send(
    self,
    ok: Array | None,
    extra_args: dict[str, Any],
    values: tuple[PyTree, PyTree],
    anchor: PyTree,
    change: PyTree,
  ) -> PyTree:
    """Exchanges what workers have changed in a fragment, if all are fine."""
    # `ok`: bool[], whether it is sent; None: always.
    send = functools.partial(self._exchange, extra_args)
    if ok is None:
      return send(values, anchor, change)
    return self._run_if(ok, send, values, (anchor, change))

  def land(self, is_sent: Array, values: PyTree, landing: PyTree) -> PyTree:
    """Moves parts of the state to what was sent, if it was."""
    # `is_sent`: bool[].
    return self._run_if(is_sent, self._land, values, (landing,))

  def _due_fragment(self, count: Array, offset: int) -> Array:
    """Returns the fragment that was sent `offset` steps ago; -1 for none."""
    # It is equal on all workers, so that a branch may be around a collective.
    gap = self.every // self.fragments
    since = count - offset
    index = (since // gap - 1) % self.fragments
    return jnp.where((since > 0) & (since % gap == 0), index, -1)

  def _run_if(
    self,
    predicate: Array,
    run: Callable[..., PyTree],
    values: PyTree,
    others: tuple[PyTree, ...],
  ) -> PyTree:
    """Returns new values, or the old ones if the predicate is False."""
    # `predicate`: bool[].

    def change(values: PyTree, *others: PyTree) -> PyTree:
      return jax.tree.map(
        lambda new, old: (
          core.to_varying(new, self.axis_name)
          if core.is_varying(old, self.axis_name)
          else new
        ),
        run(values, *others),
        values,
      )

    return lax.cond(
      predicate, change, lambda values, *_: values, values, *others
    )

  def _send(
    self,
    extra_args: dict[str, Any],
    values: tuple[PyTree, PyTree],
    anchor: PyTree,
    own: PyTree,
  ) -> PyTree:
    """Exchanges what workers have changed in a fragment."""
    change = self.find_change(anchor, core.unpack_worker(core.PerWorker(own)))
    return self._exchange(extra_args, values, anchor, change)

  def _exchange(
    self,
    extra_args: dict[str, Any],
    values: tuple[PyTree, PyTree],
    anchor: PyTree,
    change: PyTree,
  ) -> PyTree:
    return update_params(
      self.outer, change, values[1], anchor, extra_args, self.axis_name
    )

  def _land(self, values: PyTree, landing: PyTree) -> PyTree:
    """Moves the anchor, and this worker's own parameters to it."""
    anchor, own = values

    def move_own(p: Array, a: Array) -> Array:
      a = jnp.broadcast_to(a, p.shape)
      moved = a if not self.mix else self.mix * p + (1 - self.mix) * a
      return moved.astype(p.dtype)

    if own is not None:
      start = core.to_varying(landing, self.axis_name)
      own = jax.tree.map(move_own, own, start)
    return None if anchor is None else landing, own

  def _check_due(
    self, due: Array, divided: _fragments.Fragments, own: PyTree
  ) -> tuple[Array, Array]:
    """Returns whether this worker's fragment is bad, and all workers' fine."""

    def pass_by(own: PyTree) -> tuple[Array, Array]:
      del own
      return core.to_varying(jnp.bool_(False), self.axis_name), jnp.bool_(True)

    def check(k: int, own: PyTree) -> tuple[Array, Array]:
      is_bad = self.is_bad(divided.mask(own, k))
      return is_bad, self.agree(is_bad)

    checks = [functools.partial(check, k) for k in range(self.fragments)]
    return lax.switch(due + 1, [pass_by, *checks], own)
