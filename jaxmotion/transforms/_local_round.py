"""Rounds of local updates: when fragments are sent and when they land."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion.collectives.extend import keep_update, update_params
from jaxmotion.core import (
  Array,
  AxisName,
  PerWorker,
  PyTree,
  allow_unused_rules,
  check_instance,
  pack_worker,
  to_varying,
  to_varying_like,
  unpack_worker,
)
from jaxmotion.transforms._fragments import Fragments, Parts, divide_leaves


class LocalState(NamedTuple):
  """State of training by `local_updates`.

  Attributes:
    count: int32[], steps so far.
    skipped: int32[], fragments that were not sent because a worker's parameters
      were not finite.
    anchor: parameters that all workers agreed on last: evaluate and save them.
    params: each worker's own parameters.
    inner: each worker's own state of the inner optimizer.
    outer: state of the outer chain for each fragment.
    flying: with a delay, what the anchor becomes when fragments land, and
      whether each was sent; otherwise `()`.
    weights: with a `weight_fn`, each worker's weight since each fragment was
      sent last, float32[fragments]; otherwise `()`.
  """

  count: Array  # type: ignore[assignment]
  skipped: Array
  anchor: PyTree
  params: PerWorker
  inner: PerWorker
  outer: tuple[PyTree, ...]
  flying: PyTree
  weights: Any


class _Round(NamedTuple):
  """State of one worker within a step.

  Attributes:
    skipped: as in `LocalState`; so the others.
    anchor: parameters that all workers agreed on.
    params: this worker's parameters.
    inner: this worker's state of the inner optimizer.
    outer: states of the outer chain.
    flying: fragments in flight.
    weights: float32[fragments], or `()`.
  """

  skipped: Array
  anchor: PyTree
  params: PyTree
  inner: PyTree
  outer: tuple[PyTree, ...]
  flying: PyTree
  weights: Any


class LocalRounds(NamedTuple):
  """Schedule by which workers exchange what they have changed.

  Attributes:
    inner: optimizer of each worker.
    outer: optax chain with an exchange.
    axis_name: the workers' axis.
    every: steps between two exchanges of a fragment.
    fragments: number of fragments.
    delay: steps between sending and landing.
    mix: share of its own parameters that a worker keeps when a fragment lands.
    parts: (path, shape) -> fragment, or None.
    skips: whether a fragment is not sent if a worker's parameters are not
      finite.
    is_weighted: whether workers have weights.
  """

  inner: optax.GradientTransformation
  outer: optax.GradientTransformation
  axis_name: AxisName
  every: int
  fragments: int
  delay: int
  mix: float
  parts: Parts | None
  skips: bool
  is_weighted: bool

  def divide(self, params: PyTree) -> Fragments:
    """Returns the fragments of parameters."""
    return divide_leaves(params, self.fragments, self.parts)

  def init(self, params: PyTree) -> LocalState:
    """Makes one worker's state before the first step, inside of a map.

    Args:
      params: parameters, equal on all workers.
    """
    divided = self.divide(params)
    own = to_varying(params, self.axis_name)
    inner = to_varying(self.inner.init(own), self.axis_name)
    if self.fragments > 1:
      # A rule that no leaf matches is an error in the whole tree only.
      jax.eval_shape(self.outer.init, params)
    with allow_unused_rules():
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
      weights = pack_worker(to_varying(zeros, self.axis_name))
    return LocalState(
      jnp.zeros((), jnp.int32),
      jnp.zeros((), jnp.int32),
      params,
      pack_worker(own),
      pack_worker(inner),
      outer,
      flying,
      weights,
    )

  def finish_step(
    self,
    state: LocalState,
    params: PerWorker,
    inner: PerWorker,
    weight: Array | None,
    extra_args: dict[str, Any],
  ) -> LocalState:
    """Sends and lands what is due after a step, inside of a map.

    Args:
      state: state before the step.
      params: each worker's own parameters after it.
      inner: each worker's own state of the inner optimizer after it.
      weight: float32[], this worker's weight in the step, or None.
      extra_args: what the outer chain's `update` takes besides.
    """
    check_instance("state", state, LocalState, "what `init` returned")
    divided = self.divide(state.anchor)
    count = optax.safe_increment(state.count)
    weights = state.weights
    if weight is not None:
      weights = unpack_worker(weights) + weight
    now = _Round(
      state.skipped,
      state.anchor,
      unpack_worker(params),
      unpack_worker(inner),
      state.outer,
      state.flying,
      weights,
    )
    send = functools.partial(self._send, divided, extra_args)
    land = functools.partial(self._land, divided)
    if self.delay:
      now = self._run_due(count, 0, send, now)
      now = self._run_due(count, self.delay, land, now)
    else:
      now = self._run_due(count, 0, send, now)
    if self.is_weighted:
      weights = pack_worker(now.weights)
    return LocalState(
      count,
      now.skipped,
      now.anchor,
      pack_worker(now.params),
      pack_worker(now.inner),
      now.outer,
      now.flying,
      weights,
    )

  def _run_due(
    self,
    count: Array,
    offset: int,
    run: Callable[[int, _Round], _Round],
    now: _Round,
  ) -> _Round:
    """Runs what is due `offset` steps after a fragment is sent.

    The branch is around the collective, and the count is equal on all workers:
    a quiet step sends nothing.
    """
    gap = self.every // self.fragments
    due = count - offset
    index = (due // gap - 1) % self.fragments
    is_due = (due > 0) & (due % gap == 0)

    def branch(k: int, now: _Round) -> _Round:
      return to_varying_like(run(k, now), now, self.axis_name)

    branches = [lambda now: now]
    branches += [functools.partial(branch, k) for k in range(self.fragments)]
    return lax.switch(jnp.where(is_due, index + 1, 0), branches, now)

  def _send(
    self, divided: Fragments, extra_args: dict[str, Any], k: int, now: _Round
  ) -> _Round:
    """Exchanges what workers have changed in a fragment."""
    ok = None
    if self.skips:
      finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(now.params)]
      is_bad = to_varying(~jnp.stack(finite).all(), self.axis_name)
      bad = lax.psum(is_bad.astype(jnp.int32), self.axis_name)
      ok = bad == 0
      now = self._reset_worker(is_bad, now)
    anchor = divided.mask(now.anchor, k)
    delta = jax.tree.map(
      lambda a, p: to_varying(a, self.axis_name) - p,
      anchor,
      divided.mask(now.params, k),
    )
    weights = now.weights
    if self.is_weighted:
      extra_args = extra_args | {"weight": weights[k]}
      cleared = weights.at[k].set(0)
      weights = cleared if ok is None else jnp.where(ok, cleared, weights)
    with allow_unused_rules():
      landing, outer = update_params(
        self.outer, delta, now.outer[k], anchor, extra_args, self.axis_name
      )
    _, (landing, outer) = keep_update(
      ok, (), (landing, outer), (anchor, now.outer[k])
    )
    skipped = now.skipped
    if ok is not None:
      skipped = skipped + (1 - ok.astype(jnp.int32))
    now = now._replace(
      skipped=skipped,
      outer=(*now.outer[:k], outer, *now.outer[k + 1 :]),
      weights=weights,
    )
    if not self.delay:
      return self._land_fragment(divided, k, now, landing, ok)
    waiting, sent = now.flying
    flying = (
      divided.replace(waiting, landing),
      sent.at[k].set(True if ok is None else ok),
    )
    return now._replace(flying=flying)

  def _land(self, divided: Fragments, k: int, now: _Round) -> _Round:
    """Takes over a fragment that was sent some steps ago."""
    waiting, sent = now.flying
    landing = divided.mask(waiting, k)
    ok = sent[k] if self.skips else None
    return self._land_fragment(divided, k, now, landing, ok)

  def _land_fragment(
    self,
    divided: Fragments,
    k: int,
    now: _Round,
    landing: PyTree,
    ok: Array | None,
  ) -> _Round:
    """Moves the anchor, and each worker's own parameters to it."""

    def move_own(p: Array, a: Array) -> Array:
      moved = a if not self.mix else self.mix * p + (1 - self.mix) * a
      moved = moved.astype(p.dtype)
      return moved if ok is None else jnp.where(ok, moved, p)

    own = jax.tree.map(
      move_own,
      divided.mask(now.params, k),
      to_varying(landing, self.axis_name),
    )
    return now._replace(
      anchor=divided.replace(now.anchor, landing),
      params=divided.replace(now.params, own),
    )

  def _reset_worker(self, is_bad: Array, now: _Round) -> _Round:
    """Lets a worker whose parameters are not finite begin at the anchor.

    Its moments would make the next parameters non-finite again.
    """
    anchor = to_varying(now.anchor, self.axis_name)
    fresh = to_varying(self.inner.init(anchor), self.axis_name)
    params, inner = jax.tree.map(
      lambda a, b: jnp.where(is_bad, a, b),
      (anchor, fresh),
      (now.params, now.inner),
    )
    return now._replace(params=params, inner=inner)
