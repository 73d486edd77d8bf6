"""Scheme of workers that update by themselves and exchange at times."""

from typing import Any

import jax
import optax

from jaxmotion import core, hosts
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import _placement, _states
from jaxmotion.transforms.local import (
  _fragments,
  _local_round,
  _stacked_update,
)
from jaxmotion.transforms.step import _local_work, _model_state, _scheme


def local_updates(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  *,
  every: int,
  fragments: int = 1,
  delay: int = 0,
  mix: float = 0.0,
  parts: _fragments.Parts | None = None,
  nonfinite: str = "propagate",
) -> _scheme.Scheme:
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
  inner = _placement.as_transformation(inner, "inner")
  outer = _placement.as_transformation(outer, "outer")
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
    _local_round.LocalRounds(
      inner=inner,
      outer=outer,
      axis_name=None,
      every=every,
      fragments=fragments,
      delay=delay,
      mix=mix,
      parts=parts,
      skips=nonfinite == "skip",
      is_weighted=False,
    )
  )


class LocalUpdates(_scheme.Scheme):
  """Trains the replicas apart and exchanges their differences in rounds."""

  def __init__(self, rounds: _local_round.LocalRounds):
    # The workers of the schedule are filled in later.
    self._rounds = rounds

  def divide(self, params: PyTree) -> _fragments.Fragments:
    """Returns the fragments of parameters."""
    return self._rounds.divide(params)

  def init(
    self, workers: _scheme.Workers, params: PyTree
  ) -> _states.LocalState:
    """Makes one worker's state before the first step."""
    return self._rounds_of(workers).init(params)

  def params(self, workers: _scheme.Workers, state: Any) -> PyTree:
    """Returns this worker's own parameters."""
    return core.unpack_worker(state[0])

  def own(self, state: _scheme.TrainState) -> PyTree:
    """Selects each worker's own parameters and moments."""
    return state.opt_state.params, state.opt_state.inner

  def replace_own(
    self, state: _scheme.TrainState, own: PyTree
  ) -> _scheme.TrainState:
    """Returns the state with other parameters and moments of each worker."""
    params, inner = (None, None) if own is None else own
    opt_state = state.opt_state._replace(params=params, inner=inner)
    return state._replace(opt_state=opt_state)

  def count(self, opt_state: PyTree) -> Array | None:
    """Returns the number of steps so far."""
    _local_round.check_state(opt_state)
    count: Array = opt_state.count
    return count

  def start(
    self, workers: _scheme.Workers, params: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Makes the state on the mesh; raises for exchanges in wrong places."""
    self.divide(params)
    params, state = super().start(workers, params)
    if _placement.has_exchange(state.inner):
      raise ValueError(
        "`inner` must have no exchange, because each worker updates by itself, "
        "got one: it belongs to `outer`."
      )
    if workers.count > 1 and not _placement.has_exchange(state.outer):
      raise ValueError(
        "`outer` must have an exchange, got none: begin it with "
        "jaxmotion.exchange."
      )
    return params, state

  def layout(
    self, workers: _scheme.Workers, state: _scheme.TrainState
  ) -> _scheme.Layout:
    """Returns where the state is on the mesh; raises for another state."""
    _local_round.check_state(state.opt_state)
    return super().layout(workers, state)

  def make_compute(
    self, workers: _scheme.Workers, loss: _local_work.LossOptions
  ) -> _scheme.Compute:
    """Makes the function of a worker's own update, which sends nothing."""
    compute_work = _local_work.make_local_work(loss)
    update = optax.with_extra_args_support(self._rounds.inner).update

    def compute(
      own: PyTree, model_state: PyTree, *inputs: Any
    ) -> _local_work.LocalWork:
      params, inner = own
      work = compute_work(self.params(workers, own), model_state, *inputs)
      value = loss.get_loss(work.metrics)

      def update_own(
        grads: PyTree, state: PyTree, own: PyTree
      ) -> tuple[PyTree, PyTree]:
        updates, state = update(grads, state, own, value=value)
        return optax.apply_updates(own, updates), state

      grads = _local_work.add_rows(work.grads)
      moved, inner = _stacked_update.update_stacked(
        update_own, grads, inner.value, params.value
      )
      if self._rounds.skips and work.model_state is not None:
        work = work._replace(
          model_state=jax.tree.map(
            _model_state.keep_finite, work.model_state, model_state
          )
        )
      return work._replace(grads=(core.PerWorker(moved), core.PerWorker(inner)))

    return compute

  def update(
    self,
    workers: _scheme.Workers,
    state: _scheme.TrainState,
    grads: Any,
    results: _scheme.StepResults,
  ) -> tuple[PyTree, PyTree]:
    """Sends and lands what is due; `grads` are the updated parameters."""
    params, inner = grads
    return self._rounds_of(workers).finish_step(
      state.params,
      state.opt_state,
      params,
      inner,
      results.weight,
      results.extra_args,
    )

  def choose_overlap(
    self,
    workers: _scheme.Workers,
    overlap: str | None,
    loss: _local_work.LossOptions,
  ) -> str:
    """Returns "flight" for fragments in flight between CPU hosts."""
    refusal = None
    if not self._rounds.delay:
      refusal = "without a `delay`, which lets steps follow one that sends"
    elif loss.model_state is not None:
      refusal = "with a `model_state`, which each step returns"
    if refusal is None:
      way = hosts.choose_overlap(workers.mesh, workers.axis_name, overlap)
      return "flight" if way == "thread" else way
    if overlap == "thread":
      raise ValueError(f"`overlap` must be 'program' {refusal}, got 'thread'.")
    return "program"

  def find_phase(self, count: int) -> int:
    """Returns a step at which the same fragments are due and land."""
    return self._rounds.find_phase(count)

  def _rounds_of(self, workers: _scheme.Workers) -> _local_round.LocalRounds:
    return self._rounds._replace(
      axis_name=workers.axis_name, is_weighted=workers.is_weighted
    )
