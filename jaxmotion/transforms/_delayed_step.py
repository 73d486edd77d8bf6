"""Step that applies each mean gradient one step late, while the next computes.

A collective and independent computations of one XLA:CPU program take the sum of
their times, and so do two programs that one thread dispatches. Dispatched by
two threads, they take the longer of both times. So on CPU hosts a second thread
runs everything that sends; elsewhere the compiler overlaps both in one program.
"""

import concurrent.futures
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion.collectives.extend import update_params
from jaxmotion.core import (
  Array,
  AxisName,
  PerWorker,
  PyTree,
  check_instance,
  pack_worker,
  state_specs,
  to_varying,
  unpack_worker,
)
from jaxmotion.transforms._averages import average_work, find_metric_specs
from jaxmotion.transforms._exchange_state import DelayedState
from jaxmotion.transforms._local_work import LocalWork
from jaxmotion.transforms._shardings import Shardings

OVERLAPS = (None, "program", "thread")


class DelayedUpdate(NamedTuple):
  """Second half of a delayed step: what sends.

  Attributes:
    tx: optax chain with an exchange.
    axis_name: the workers' axis.
    shardings: where arrays are on the mesh.
    check: raises unless (state, extra arguments) are valid.
    mean_loss: whether floating-point scalars of the metrics become means.
    is_weighted: whether each worker has a weight.
  """

  tx: optax.GradientTransformation
  axis_name: AxisName
  shardings: Shardings
  check: Callable[[PyTree, dict[str, Any]], None]
  mean_loss: bool
  is_weighted: bool

  def init(self, params: PyTree) -> DelayedState:
    """Makes one worker's state before the first step, inside of a map.

    Args:
      params: parameters, whole on every worker.
    """
    zeros = jax.tree.map(jnp.zeros_like, params)
    weight = jnp.zeros((), jnp.float32) if self.is_weighted else None
    pending = to_varying((zeros, weight), self.axis_name)
    return DelayedState(
      jnp.zeros((), jnp.int32), self.tx.init(params), pack_worker(pending)
    )

  def apply(
    self, params: PyTree, state: DelayedState, extra_args: dict[str, Any]
  ) -> tuple[PyTree, PyTree]:
    """Exchanges and applies the gradients of the step before.

    Args:
      params: parameters.
      state: state before this step.
      extra_args: what the chain's `update` takes besides.

    Returns:
      The new parameters and the new state of the chain.
    """
    check_instance("opt_state", state, DelayedState, "what `init` returned")
    self.check(state, extra_args)
    param_specs = self.shardings.params(params)
    state_spec = self.shardings.state(state, params)
    params, state, extra_args = self.shardings.place(
      (params, state, extra_args), (param_specs, state_spec, P())
    )

    def apply_own(
      params: PyTree, state: DelayedState, extra_args: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
      grads, weight = unpack_worker(state.pending)
      if weight is not None:
        extra_args = extra_args | {"weight": weight}
      # Zeros of the first step pass too: XLA:CPU copies what a branch around
      # them would return, which costs more than it saves.
      return update_params(
        self.tx, grads, state.inner, params, extra_args, self.axis_name
      )

    own_specs: Any = state_specs(state, self.axis_name)
    new = jax.shard_map(
      apply_own,
      in_specs=(P(), own_specs, P()),
      out_specs=(P(), own_specs.inner),
      **self.shardings.map_options,
    )(params, state, extra_args)
    inner_spec: Any = getattr(state_spec, "inner", state_spec)
    return self.shardings.place(new, (param_specs, inner_spec))

  def average(self, work: LocalWork) -> PyTree:
    """Returns the metrics of this step, averaged over workers.

    Args:
      work: every worker's own, with a leading axis of workers.
    """
    split = P(self.axis_name)
    specs = find_metric_specs(work.metrics, self.axis_name, self.mean_loss)

    def average_own(work: LocalWork) -> PyTree:
      metrics, _ = average_work(
        work,
        None,
        self.axis_name,
        model_state=None,
        mean_loss=self.mean_loss,
      )
      return metrics

    return jax.shard_map(
      average_own, in_specs=split, out_specs=specs, **self.shardings.map_options
    )(work._replace(grads=None))


# (params, opt_state, batch, key) -> the workers' own work, before any exchange.
Compute = Callable[[PyTree, PyTree, PyTree, PyTree], LocalWork]


def make_delayed_run(
  compute: Compute, update: DelayedUpdate
) -> Callable[..., tuple[PyTree, None, DelayedState, PyTree]]:
  """Makes the whole step as one program.

  Args:
    compute: first half of the step.
    update: second half.

  Returns:
    A function (params, model_state, opt_state, batch, key, extra_args) ->
    (params, model_state, opt_state, metrics), without model state.
  """

  def run_step(
    params: PyTree,
    model: None,
    opt_state: DelayedState,
    batch: PyTree,
    key: Array | None,
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, None, DelayedState, PyTree]:
    work = compute(params, opt_state, batch, key)
    params, inner = update.apply(params, opt_state, extra_args)
    return (
      params,
      model,
      _advance(opt_state.count + 1, inner, work),
      update.average(work),
    )

  return run_step


def make_threaded_call(
  compute: Compute, update: DelayedUpdate, *, donate: bool
) -> Callable[..., tuple[PyTree, DelayedState, PyTree]]:
  """Makes the step as programs of two threads, which send and compute.

  Args:
    compute: first half of the step.
    update: second half.
    donate: whether to donate the state; parameters are read by both threads.

  Returns:
    A function (params, opt_state, batch, *, key=None, **extra_args) ->
    (params, opt_state, metrics).
  """

  def compute_first(
    params: PyTree, count: Array, batch: PyTree, key: Array | None
  ) -> tuple[LocalWork, Array]:
    state = DelayedState(count, (), PerWorker(()))
    return compute(params, state, batch, key), count + 1

  def apply_last(
    params: PyTree,
    count: Array,
    rest: tuple[PyTree, PerWorker],
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, PyTree]:
    state = DelayedState(count, *rest)
    params, inner = update.apply(params, state, extra_args)
    # XLA gives donated buffers to the first results of their sizes. If that
    # were parameters, error memory would be copied.
    return inner, params

  jit_compute = jax.jit(compute_first)
  jit_apply = jax.jit(apply_last, donate_argnums=(2,) if donate else ())
  jit_average = jax.jit(update.average)
  # One thread, so that all hosts run their collectives in the same order.
  sender = concurrent.futures.ThreadPoolExecutor(1, "jaxmotion-sender")

  def send(fun: Callable[..., Any], *args: Any) -> concurrent.futures.Future:
    return sender.submit(lambda: jax.block_until_ready(fun(*args)))

  def call(
    params: PyTree,
    opt_state: DelayedState,
    batch: PyTree,
    *,
    key: Array | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, DelayedState, PyTree]:
    check_instance("opt_state", opt_state, DelayedState, "what `init` returned")
    count, *rest = opt_state
    sent = send(jit_apply, params, count, rest, extra_args)
    try:
      work, count = jit_compute(params, count, batch, key)
      jax.block_until_ready(work)
    finally:
      # Nothing else may send until this thread has.
      inner, params = sent.result()
    metrics = send(jit_average, work).result()
    return params, _advance(count, inner, work), metrics

  return call


def choose_overlap(mesh: Mesh, overlap: str | None) -> str:
  """Returns how a step hides its exchange: "program" or "thread".

  Args:
    mesh: device mesh of the step.
    overlap: what the caller chose, or None.

  Raises:
    ValueError: threads were asked for, and a process has several devices: two
      programs with collectives of all of them could wait for one another.
  """
  own = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
  is_alone = len(own) == 1
  if overlap == "thread" and not is_alone:
    raise ValueError(
      "`overlap` must be 'program' for a process with several devices, got "
      f"'thread' for {len(own)}."
    )
  if overlap is not None:
    return overlap
  has_hosts = mesh.size > 1 and own[0].platform == "cpu"
  return "thread" if is_alone and has_hosts else "program"


def _advance(count: Array, inner: PyTree, work: LocalWork) -> DelayedState:
  """Returns the state after a step, whose gradients wait for the next one."""
  return DelayedState(count, inner, PerWorker((work.grads, work.weight)))
