"""Step that applies each mean gradient one step late, while the next computes.

On CPU hosts a second thread dispatches everything that sends; elsewhere the
compiler overlaps both in one program.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from jaxmotion import core
from jaxmotion.collectives.extend import branch_after_only, update_params
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import (
  _averages,
  _exchange_state,
  _local_work,
  _sender,
  _shardings,
)


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
  shardings: _shardings.Shardings
  check: Callable[[PyTree, dict[str, Any]], None]
  mean_loss: bool
  is_weighted: bool

  def init(self, params: PyTree) -> _exchange_state.DelayedState:
    """Makes one worker's state before the first step, inside of a map."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    weight = jnp.zeros((), jnp.float32) if self.is_weighted else None
    pending = core.to_varying((zeros, weight), self.axis_name)
    return _exchange_state.DelayedState(
      jnp.zeros((), jnp.int32), self.tx.init(params), core.pack_worker(pending)
    )

  def apply(
    self,
    params: PyTree,
    state: _exchange_state.DelayedState,
    extra_args: dict[str, Any],
    metrics: PyTree = None,
  ) -> tuple[PyTree, PyTree]:
    """Exchanges and applies the gradients of the step before."""
    # Returns the new parameters and the new state of the chain.
    # Of what is not averaged, each worker has its own, with an axis of workers.
    sums = [m for m in jax.tree.leaves(metrics) if not jnp.ndim(m)]
    core.check_instance(
      "opt_state", state, _exchange_state.DelayedState, "what `init` returned"
    )
    self.check(state, extra_args)
    param_specs = self.shardings.params(params)
    state_spec = self.shardings.state(state, params)
    params, state, extra_args = self.shardings.place(
      (params, state, extra_args), (param_specs, state_spec, P())
    )

    def apply_own(
      params: PyTree,
      state: _exchange_state.DelayedState,
      extra_args: dict[str, Any],
      sums: list[Array],
    ) -> tuple[PyTree, PyTree]:
      grads, weight = core.unpack_worker(state.pending)
      if weight is not None:
        extra_args = extra_args | {"weight": weight}
      # Zeros of the first step pass too: XLA:CPU copies what a branch around
      # them would return, which costs more than it saves.
      with branch_after_only(sums):
        return update_params(
          self.tx, grads, state.inner, params, extra_args, self.axis_name
        )

    own_specs: Any = core.state_specs(state, self.axis_name)
    new = jax.shard_map(
      apply_own,
      in_specs=(P(), own_specs, P(), P()),
      out_specs=(P(), own_specs.inner),
      **self.shardings.map_options,
    )(params, state, extra_args, sums)
    inner_spec: Any = getattr(state_spec, "inner", state_spec)
    return self.shardings.place(new, (param_specs, inner_spec))

  def average(self, work: _local_work.LocalWork) -> PyTree:
    """Returns the metrics of this step, averaged over workers."""
    return _averages.map_average(
      work, self.axis_name, self.mean_loss, self.shardings.map_options
    )


# (params, opt_state, batch, key) -> the workers' own work, before any exchange.
Compute = Callable[[PyTree, PyTree, PyTree, PyTree], _local_work.LocalWork]


def make_delayed_run(
  compute: Compute, update: DelayedUpdate
) -> Callable[..., tuple[PyTree, None, _exchange_state.DelayedState, PyTree]]:
  """Makes the whole step as one program."""

  def run_step(
    params: PyTree,
    model: None,
    opt_state: _exchange_state.DelayedState,
    batch: PyTree,
    key: Array | None,
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, None, _exchange_state.DelayedState, PyTree]:
    work = compute(params, opt_state, batch, key)
    metrics = update.average(work)
    params, inner = update.apply(params, opt_state, extra_args, metrics)
    state = _advance(opt_state.count + 1, inner, work)
    return params, model, state, metrics

  return run_step


def make_threaded_call(
  compute: Compute,
  update: DelayedUpdate,
  sender: _sender.Sender,
  *,
  donate: bool,
) -> Callable[..., tuple[PyTree, _exchange_state.DelayedState, PyTree]]:
  """Makes the step as programs of two threads, which send and compute."""

  def compute_first(
    params: PyTree, count: Array, batch: PyTree, key: Array | None
  ) -> tuple[_local_work.LocalWork, Array]:
    state = _exchange_state.DelayedState(count, (), core.PerWorker(()))
    return compute(params, state, batch, key), count + 1

  def apply_last(
    params: PyTree,
    count: Array,
    rest: tuple[PyTree, core.PerWorker],
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, PyTree]:
    state = _exchange_state.DelayedState(count, *rest)
    params, inner = update.apply(params, state, extra_args)
    # XLA gives donated buffers to the first results of their sizes. If that
    # were parameters, error memory would be copied.
    return inner, params

  jit_compute = jax.jit(compute_first)
  jit_apply = jax.jit(apply_last, donate_argnums=(2,) if donate else ())
  jit_average = jax.jit(update.average)

  def call(
    params: PyTree,
    opt_state: _exchange_state.DelayedState,
    batch: PyTree,
    *,
    key: Array | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, _exchange_state.DelayedState, PyTree]:
    core.check_instance(
      "opt_state",
      opt_state,
      _exchange_state.DelayedState,
      "what `init` returned",
    )
    count, *rest = opt_state
    sent = sender.send(jit_apply, params, count, rest, extra_args)
    try:
      work, count = jit_compute(params, count, batch, key)
      metrics = sender.send(jit_average, work)
    finally:
      # The caller may send as soon as this function ends, after an error too.
      # Two sums at a time could meet the wrong ones of other hosts.
      jax.block_until_ready(sent)
    jax.block_until_ready((work, metrics))
    inner, params = sent
    return params, _advance(count, inner, work), metrics

  return call


def _advance(
  count: Array, inner: PyTree, work: _local_work.LocalWork
) -> _exchange_state.DelayedState:
  """Returns the state after a step, whose gradients wait for the next one."""
  return _exchange_state.DelayedState(
    count, inner, core.PerWorker((work.grads, work.weight))
  )
