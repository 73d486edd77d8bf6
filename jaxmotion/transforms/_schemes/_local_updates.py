"""Scheme of workers that update by themselves and exchange at times."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core, program
from jaxmotion.core import PyTree
from jaxmotion.transforms import _states
from jaxmotion.transforms._schemes import _local_round
from jaxmotion.transforms._step import _local_work, _results, _scheme
from jaxmotion.transforms._step._results import LocalWork, LossOptions
from jaxmotion.transforms._step._scheme import Scheme, TrainState, Workers


def local_updates(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  *,
  every: int,
  fragments: int = 1,
  delay: int = 0,
  mix: float = 0.0,
  parts: _local_round.Parts | None = None,
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
  inner = _states.as_transformation(inner, "inner")
  outer = _states.as_transformation(outer, "outer")
  core.check_int("every", every, 1, 2**31 - 1)
  core.check_int("fragments", fragments, 1, 2**31 - 1)
  core.check_int("delay", delay, 0, 2**31 - 1)
  core.check_number("mix", mix, 0, 1, open_high=True)
  if parts is not None:
    core.check_callable("parts", parts)
  core.check_choice("nonfinite", nonfinite, ("skip", "propagate"))
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


class LocalUpdates(_local_round.LocalRounds):
  """Trains the replicas apart and exchanges their differences in rounds."""

  may_fly = True

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
    _check_state(opt_state)
    return opt_state.count

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
    _check_state(state.opt_state)
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
        updates, state = update(grads, state, own, value=value)
        return optax.apply_updates(own, updates), state

      grads = _results.add_rows(work.grads)
      moved, inner = update_stacked(
        update_own, grads, inner.value, params.value
      )
      if self.skips and work.model_state is not None:
        kept = jax.tree.map(_results.keep_finite, work.model_state, model_state)
        work = work._replace(model_state=kept)
      return work._replace(grads=(core.PerWorker(moved), core.PerWorker(inner)))

    return compute

  def refuse_threads(self, loss: LossOptions) -> str | None:
    """Returns why fragments cannot be in flight beside steps, or None."""
    if not self.delay:
      return "without a `delay`, which lets steps follow one that sends"
    if loss.model_state is not None:
      return "with a `model_state`, which each step returns"
    return None


def _check_state(state: Any) -> None:
  """Raises unless a scheme's state is that of `local_updates`."""
  core.check_instance(
    "state/opt_state", state, _states.LocalState, "what `init` returned"
  )


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
