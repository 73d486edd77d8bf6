"""Scheme of workers that update by themselves and exchange at times."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import core, hosts, program
from jaxmotion.collectives.extend import update_params
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _states
from jaxmotion.transforms._schemes._fragments import (
  Fragments,
  Parts,
  divide_leaves,
)
from jaxmotion.transforms._states import LocalState
from jaxmotion.transforms._step import _local_work, _results, _scheme
from jaxmotion.transforms._step._results import LocalWork, LossOptions
from jaxmotion.transforms._step._scheme import (
  Scheme,
  StepResults,
  TrainState,
  Workers,
)

_OWN_STATE = core.instance(LocalState, "what `init` returned")


@core.declare(
  inner=_states.as_transformation,
  outer=_states.as_transformation,
  every=core.integer(1, 2**31 - 1),
  fragments=core.integer(1, 2**31 - 1),
  delay=core.integer(0, 2**31 - 1),
  mix=core.number(0, 1, open_high=True),
  parts=core.optional(core.function),
  nonfinite=core.choice(("skip", "propagate")),
)
def local_updates(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  *,
  every: int,
  fragments: int = 1,
  delay: int = 0,
  mix: float = 0.0,
  parts: Parts | None = None,
  nonfinite: str = "propagate",
) -> Scheme:
  r"""Makes the scheme of workers that exchange at some steps only.

  Each worker trains its own parameters (local SGD, DiLoCo). Every `every` steps
  the workers exchange how far they went from the anchor, the parameters that
  they agreed on last. With the gradient of the outer chain

  .. math:: d_r = a - p_r

  the chain's update moves the anchor a, and own parameters p_r begin there
  again. A quiet step sends nothing but its loss.

  With fragments, a part of the parameters is sent every `every / fragments`
  steps, in turns, so that no step sends them all (streaming DiLoCo). With a
  delay, a fragment lands some steps after it was sent. With `mix`, a worker
  keeps a share of its own parameters: p = mix p + (1 - mix) a.

  Args:
    inner: optimizer of each worker, without an exchange. Its state is kept over
      exchanges.
    outer: optax chain with an `exchange` over the workers' axis, such as
      `chain(exchange("data", codec), sgd(0.7, momentum=0.9, nesterov=True))`.
    every: number of steps between two exchanges of the same parameters.
    fragments: number of parts of the parameters, a divisor of `every`.
    delay: number of steps between sending and landing, less than `every`.
    mix: share of its own parameters that a worker keeps, in [0, 1).
    parts: (path, shape) -> index of the fragment. None deals leaves out in
      turns, the largest first.
    nonfinite: "skip": if a fragment is not finite on a worker when it is due,
      it is not sent and nothing moves. This worker begins at the anchor with a
      fresh inner state; others keep what they have changed. It costs a sum of 4
      bytes. "propagate" checks nothing.

  Returns:
    A scheme for `make_train_step`. `state.params` are the anchor: evaluate and
    save it. `state.opt_state` is a `LocalState`, whose `params` are each
    worker's own. Workers are weighed by what `weight_fn` summed up since the
    fragment was sent last. With `mean_loss` every step sends its loss; without
    it, quiet steps send nothing. Extra arguments of `step` go to the outer
    chain's update. The program branches over what is due:
    `wire.compiled_bytes(compiled, branch=0)` is a quiet step, and `branch=1`
    what a step would send in which all fragments are due. `overlap="thread"`
    is for a `delay`: a second thread of each process sends a fragment beside
    the steps that follow. With it, wait for `state.params` before another
    program of yours sends anything.

  Raises:
    TypeError: an argument of another type.
    ValueError: `fragments` do not divide `every`; a `delay` of `every` or more.
      `init` raises it for an `inner` with an exchange, an `outer` without one,
      and fragments that no leaf fills.

  Example:
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> outer = optax.chain(
    ...   transforms.exchange("data", codecs.uniform(bits=8)), optax.sgd(1.0)
    ... )
    >>> scheme = local_updates(optax.sgd(0.1), outer, every=2)
    >>> init, step = transforms.make_train_step(loss_fn, scheme, mesh)
    >>> state = init({"w": jnp.zeros((2, 1))})
    >>> batch = {"x": jnp.eye(2), "y": jnp.ones((2, 1))}
    >>> for _ in range(2):
    ...   state, loss = step(state, batch)
    >>> state.params["w"].ravel().tolist() == [0.19, 0.19]
    False
    >>> bool(jnp.allclose(state.params["w"], 0.19, atol=1e-3))
    True

  References:
    Douillard et al., *DiLoCo*, arXiv 2311.08105, 2023; Douillard et al.,
    *Streaming DiLoCo with overlapping communication*, arXiv 2501.18512, 2025.
  """
  if every % fragments:
    raise ValueError(
      f"`fragments` must divide `every`, {every}, got {fragments}."
    )
  if delay >= every:
    raise ValueError(
      f"`delay` must be less than `every`, {every}, so that a fragment lands "
      f"before it is sent again, got {delay}."
    )
  return LocalUpdates(
    inner, outer, every, fragments, delay, mix, parts, skips=nonfinite == "skip"
  )


@dataclasses.dataclass(frozen=True)
class LocalUpdates(Scheme):
  """Trains the replicas apart and exchanges their differences in rounds.

  All workers share the anchor, the parameters that they agreed on last. In each
  round every fragment of it is due once: the workers exchange how far they have
  moved from the anchor, and `delay` steps later the new anchor lands.
  """

  inner: optax.GradientTransformation  # That of each worker.
  outer: optax.GradientTransformation  # A chain with an exchange.
  every: int  # Steps between two exchanges of a fragment.
  fragments: int
  delay: int  # Steps between sending and landing.
  mix: float  # Share of its own parameters that a worker keeps at a landing.
  parts: Parts | None  # (path, shape) -> fragment.
  skips: bool  # Whether a fragment that is not finite on a worker is not sent.
  # Those of the workers, which `for_workers` fills in.
  axis_name: AxisName = None
  is_weighted: bool = False
  may_fly = True

  def for_workers(self, workers: Workers) -> Scheme:
    """Returns the scheme with the workers of its schedule."""
    return dataclasses.replace(
      self, axis_name=workers.axis_name, is_weighted=workers.is_weighted
    )

  def divide(self, params: PyTree) -> Fragments:
    """Divides leaves of parameters into fragments, by `parts` or by size."""
    return divide_leaves(params, self.fragments, self.parts)

  def init(self, workers: Workers, params: PyTree) -> LocalState:
    """Makes one worker's state before the first step, inside of a map."""
    assert self.axis_name is not None, "`for_workers` comes first"
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
    return LocalState(
      *_states.make_counts(),
      core.pack_worker(own),
      core.pack_worker(inner),
      outer,
      flying,
      weights,
    )

  def params(self, workers: Workers, state: Any) -> PyTree:
    """Returns this worker's own parameters."""
    return core.unpack_worker(state[0])

  def own(self, state: TrainState) -> PyTree:
    """Selects each worker's own parameters and moments."""
    return state.opt_state.params, state.opt_state.inner

  def replace_own(self, state: TrainState, own: PyTree) -> TrainState:
    """Returns the state with other parameters and moments of each worker."""
    params, inner = (None, None) if own is None else own
    opt_state = state.opt_state._replace(params=params, inner=inner)
    return state._replace(opt_state=opt_state)

  def count(self, opt_state: PyTree) -> Any:
    """Returns the number of steps so far."""
    return _OWN_STATE("state/opt_state", opt_state).count

  def start(self, workers: Workers, params: PyTree) -> tuple[PyTree, PyTree]:
    """Makes the state on the mesh; raises for exchanges in wrong places."""
    self.divide(params)
    params, state = super().start(workers, params)
    if _states.find_exchanges(state.inner):
      raise ValueError(
        "`inner` must have no exchange, because each worker updates by itself, "
        "got one: it belongs to `outer`."
      )
    if workers.count > 1 and not _states.find_exchanges(state.outer):
      raise ValueError(
        "`outer` must have an exchange, got none: begin it with "
        "jaxmotion.exchange."
      )
    return params, state

  def layout(self, workers: Workers, state: TrainState) -> _scheme.Layout:
    """Returns where the state is on the mesh; raises for another state."""
    _OWN_STATE("state/opt_state", state.opt_state)
    return super().layout(workers, state)

  def make_compute(
    self, workers: Workers, loss: LossOptions
  ) -> _scheme.Compute:
    """Makes the function of a worker's own update, which sends nothing."""
    compute_work = _local_work.make_local_work(loss)
    update = optax.with_extra_args_support(self.inner).update

    def compute(own: PyTree, model_state: PyTree, *inputs: Any) -> LocalWork:
      """Returns new own parameters and moments in place of a gradient."""
      params, inner = own
      work = compute_work(self.params(workers, own), model_state, *inputs)
      value = loss.get_loss(work.metrics)

      def update_own(grads: PyTree, state: PyTree, own: PyTree) -> PyTree:
        """Takes one step of the inner optimizer."""
        updates, state = update(grads, state, own, value=value)
        return optax.apply_updates(own, updates), state

      # Own parameters and moments have an axis of workers, here of length 1.
      grads = _results.add_rows(work.grads)
      new, inner = update_stacked(update_own, grads, inner.value, params.value)
      # Parameters that are not finite begin anew at the anchor, this state not.
      if self.skips and work.model_state is not None:
        finite = jax.tree.map(
          _results.keep_finite, work.model_state, model_state
        )
        work = work._replace(model_state=finite)
      return work._replace(grads=(core.PerWorker(new), core.PerWorker(inner)))

    return compute

  def refuse_threads(self, loss: LossOptions) -> str | None:
    """Returns why fragments cannot be in flight beside steps, or None."""
    if not self.delay:
      return "without a `delay`, which lets steps follow one that sends"
    if loss.model_state is not None:
      return "with a `model_state`, which each step returns"
    return None

  def update(
    self, workers: Workers, state: TrainState, grads: Any, results: StepResults
  ) -> tuple[PyTree, LocalState]:
    """Sends the fragment that is due after a step, lands one, inside a map."""
    # grads: each worker's own parameters and moments after the step.
    anchor, old = state.params, state.opt_state
    divided = self.divide(anchor)
    count = optax.safe_increment(old.count)
    sending = hosts.check_sending(results.extra_args.get("sending"))
    # Whether the host knows the step. The program then has those fragments only
    # that are due or land in it, and needs no branches to choose them.
    is_known = sending.phase is not None
    now: Any = sending.phase if is_known else count
    due = self._due_fragment(now, 0)
    active = list(range(self.fragments))
    if is_known:
      # What lands comes first, as it waits for nothing that this step sends.
      active = [k for k in self._find_active(now) if k >= 0]
    else:
      due = sending.order_branch(due)
    # With their leading axis, as XLA copies what passes a branch as a view.
    own, inner_own = (one.value for one in grads)
    ok, skipped = None, old.skipped
    if self.skips:
      is_bad, ok = self._check_due(due, divided, own, sending)
      own, inner_own = self._run_if(
        is_bad, self._restart_worker, (own, inner_own), (anchor,)
      )
    if ok is not None:
      skipped = skipped + ((due >= 0) & ~ok).astype(jnp.int32)
    weights = old.weights
    if results.weight is not None:
      weights = core.unpack_worker(weights) + results.weight
    outer, flying = list(old.outer), old.flying
    # A conditional for each fragment, of what changes with it alone: XLA copies
    # the results of a switch over all fragments, the whole state, at each step.
    for k in active:
      is_sent = due == k if ok is None else _both(due == k, ok)
      given = dict(results.extra_args)
      if self.is_weighted:
        given["weight"] = weights[k]
        weights = weights.at[k].set(jnp.where(is_sent, 0, weights[k]))
      landing = divided.mask(flying[0] if self.delay else anchor, k)
      fragment = divided.mask(anchor, k), divided.mask(own, k)
      landing, outer[k] = self._send(
        is_sent, (landing, outer[k]), fragment, given, is_known
      )
      is_landing = is_sent
      if self.delay:
        flying = (
          divided.replace(flying[0], landing),
          flying[1].at[k].set(jnp.where(due == k, is_sent, flying[1][k])),
        )
        is_late = self._due_fragment(now, self.delay) == k
        is_landing = _both(is_late, flying[1][k])
      moved = self._run_if(is_landing, self._land, fragment, (landing,))
      anchor = divided.replace(anchor, moved[0])
      own = divided.replace(own, moved[1])
    if self.is_weighted:
      weights = core.pack_worker(weights)
    if is_known and due >= 0:
      # Whoever reads the anchor waits for what is in flight, and may then send.
      waiting, _ = lax.optimization_barrier(
        (divided.mask(anchor, due), divided.mask(flying[0], due))
      )
      anchor = divided.replace(anchor, waiting)
    return anchor, LocalState(
      count,
      skipped,
      core.PerWorker(own),
      core.PerWorker(inner_own),
      tuple(outer),
      flying,
      weights,
    )

  def find_phase(self, count: int) -> int:
    """Returns a step at which the same fragments are due and land."""
    # One of the second round: in the first one some land that were never sent,
    # which changes nothing, and no programs are made for that round alone.
    active = self._find_active(count + self.every)
    steps = range(self.every, 2 * self.every)
    return next(n for n in steps if self._find_active(n) == active)

  def _restart_worker(
    self, values: tuple[PyTree, PyTree], anchor: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Returns the anchor and fresh moments for a worker that is not finite."""
    # values: its parameters and moments. The moments would make the next
    # parameters non-finite again.
    start = core.to_varying(anchor, self.axis_name)
    inner = core.to_varying(self.inner.init(start), self.axis_name)
    return core.pack_worker(start).value, core.pack_worker(inner).value

  def _find_active(self, count: int) -> tuple[int, int]:
    """Returns the fragment that lands and the one that is due; -1 for none."""
    return self._due_fragment(count, self.delay), self._due_fragment(count, 0)

  def _due_fragment(self, count: Any, offset: int) -> Any:
    """Returns the fragment that was due `offset` steps ago; -1 for none."""
    # count: steps so far, equal on all workers, so that a branch may be around
    # a collective.
    gap = self.every // self.fragments
    since = count - offset
    index = (since // gap - 1) % self.fragments
    is_due = (since > 0) & (since % gap == 0)
    if isinstance(count, int):
      return index if is_due else -1
    return jnp.where(is_due, index, -1)

  def _run_if(
    self,
    predicate: Array | bool,
    run: Callable[..., PyTree],
    values: PyTree,
    others: tuple[PyTree, ...],
  ) -> PyTree:
    """Returns `run(values, *others)`, or `values` if the predicate is False."""
    # predicate: bool[], or a bool, which needs no branch.

    def change(values: PyTree, *others: PyTree) -> PyTree:
      """Types new values as varying where the old ones are: branches must."""
      return jax.tree.map(
        lambda new, old: (
          core.to_varying(new, self.axis_name)
          if core.is_varying(old, self.axis_name)
          else new
        ),
        run(values, *others),
        values,
      )

    if isinstance(predicate, bool):
      return change(values, *others) if predicate else values
    return lax.cond(
      predicate, change, lambda values, *_: values, values, *others
    )

  def _send(
    self,
    is_sent: Array | bool,
    values: tuple[PyTree, PyTree],
    fragment: tuple[PyTree, PyTree],
    extra_args: dict[str, Any],
    is_known: bool,
  ) -> PyTree:
    """Runs the outer chain on what workers changed in a fragment, if sent."""
    # values: the anchor when it lands, and the chain's state. fragment: the
    # anchor and this worker's own parameters. is_known: whether the host knows
    # the step, which may then end before what it sends has arrived.

    def find_change(anchor: PyTree, own: PyTree) -> PyTree:
      start = core.to_varying(anchor, self.axis_name)
      own = core.unpack_worker(core.PerWorker(own))
      return jax.tree.map(lambda a, p: a - p, start, own)

    exchange = lambda values, anchor, change: update_params(
      self.outer, change, values[1], anchor, extra_args, self.axis_name
    )
    if not is_known:
      return self._run_if(
        is_sent,
        lambda values, a, p: exchange(values, a, find_change(a, p)),
        values,
        fragment,
      )
    change = hosts.mark_computed(find_change(*fragment))
    return self._run_if(is_sent, exchange, values, (fragment[0], change))

  def _land(
    self, values: tuple[PyTree, PyTree], landing: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Moves the anchor to a fragment that lands, and the own parameters too."""

    def move_own(own: Array, new: Array) -> Array:
      new = jnp.broadcast_to(new, own.shape)
      moved = new if not self.mix else self.mix * own + (1 - self.mix) * new
      return moved.astype(own.dtype)

    start = core.to_varying(landing, self.axis_name)
    return landing, jax.tree.map(move_own, values[1], start)

  def _check_due(
    self, due: Any, divided: Fragments, own: PyTree, sending: hosts.Sending
  ) -> tuple[Array | bool, Array | None]:
    """Returns whether a due fragment is bad on this worker, and good on all."""
    # Bad means not finite. A fragment is sent if it is good on all workers.
    # due: number of the fragment, -1 if none is. In a step of one program (no
    # phase) it is an array; the host knows it in a step of several programs. If
    # none is due there, nothing asks whether it is good.

    def check_none(own: PyTree) -> tuple[Array, Array]:
      return core.to_varying(jnp.bool_(False), self.axis_name), jnp.bool_(True)

    def check(k: int, own: PyTree) -> tuple[Array, Array]:
      leaves = jax.tree.leaves(divided.mask(own, k))
      finite = [jnp.isfinite(x).all() for x in leaves]
      is_bad = core.to_varying(~jnp.stack(finite).all(), self.axis_name)
      # A sum of 4 bytes.
      return is_bad, lax.psum(is_bad.astype(jnp.int32), self.axis_name) == 0

    if sending.phase is None:
      checks = [functools.partial(check, k) for k in range(self.fragments)]
      return lax.switch(due + 1, [check_none, *checks], own)
    if due < 0:
      return False, None
    is_bad, ok = check(due, own)
    # What is sent in a branch must come after sums before it, on every worker.
    return is_bad, sending.order_branch(ok)


def _both(first: Array | bool, second: Array) -> Array | bool:
  """Returns whether both hold, which needs no array if the first does not."""
  return first is not False and first & second


def update_stacked(fun: Callable[..., PyTree], *args: PyTree) -> PyTree:
  """Runs an update on one worker's own arrays, in place on CPU."""
  # fun: one worker's own arrays -> a tuple of trees. args: trees with a leading
  # axis of length 1, which the results have too.
  # XLA:CPU writes a result into the buffer of a donated array only if it reads
  # that array element by element. The view without the leading axis of workers
  # is no such read. So the results would be copied: all moments, at every step.
  # The update is therefore batched over the leading axis. Updates that branch,
  # loop or call kernels are not, because a batched branch runs both sides.
  own = [core.unpack_worker(core.PerWorker(tree)) for tree in args]
  jaxpr, shapes = jax.make_jaxpr(fun, return_shape=True)(*own)
  run = core.jax_core.jaxpr_as_fun(jaxpr)
  is_straight = not any(
    program.inner_jaxprs(step.eqn) or "callback" in step.name
    for step in program.flatten(jaxpr, calls="all").steps
  )
  if is_straight:
    results = jax.vmap(run)(*jax.tree.leaves(args))
  else:
    results = [jnp.expand_dims(a, 0) for a in run(*jax.tree.leaves(own))]
  return jax.tree.unflatten(jax.tree.structure(shapes), results)
