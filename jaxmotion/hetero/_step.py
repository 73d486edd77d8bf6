"""Data-parallel training step with unequal work for each worker."""

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core, transforms
from jaxmotion.collectives.extend import update_params
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.hetero import _accumulate, _assign
from jaxmotion.transforms.extend import Shardings


class UnevenState(NamedTuple):
  """Training state of an uneven step.

  Attributes:
    params: parameters of the model.
    opt_state: state of the optax chain, with each worker's error memory.
    stats: batch statistics, the same on all workers, or None.

  Example:
    >>> import optax
    >>> from jaxmotion import hetero, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> tx = optax.chain(transforms.exchange("data"), optax.sgd(0.5))
    >>> uneven = hetero.uneven_data_parallel(
    ...   lambda w, x: (jnp.sum((x - w) ** 2), x.size), tx, mesh
    ... )
    >>> state = uneven.init(jnp.zeros(3))
    >>> state.params.tolist(), state.stats
    ([0.0, 0.0, 0.0], None)
  """

  params: PyTree
  opt_state: PyTree
  stats: PyTree


class Metrics(NamedTuple):
  """Metrics of one step, the same on all workers.

  Attributes:
    loss: float32[], mean over all examples (or tokens); 0 if there were none.
    counts: float32[workers], number of examples or tokens of each worker.
    seconds: float32[workers], seconds of each worker for its own work; 0 if not
      given.

  Example:
    >>> metrics = Metrics(
    ...   loss=jnp.float32(0.5),
    ...   counts=jnp.array([8.0, 4.0]),
    ...   seconds=jnp.array([0.5, 0.0]),
    ... )
    >>> metrics.throughput.tolist()
    [16.0, 0.0]
  """

  loss: Array
  counts: Array
  seconds: Array

  @property
  def throughput(self) -> Array:
    """Examples (or tokens) per second of each worker, float32[workers].

    It is 0 for a worker whose time is not known. The sum over workers is the
    throughput of an ideal split of the work.
    """
    timed = self.seconds > 0
    return jnp.where(timed, self.counts / jnp.where(timed, self.seconds, 1), 0)


class UnevenStep(NamedTuple):
  """The four functions that `uneven_data_parallel` returns.

  Attributes:
    init: (params, stats=None) -> state, placed on the mesh.
    work: (state, batch, counts) -> work. Sums every worker's own microbatches.
      Nothing is sent, so a worker's shard of the result is ready when that
      worker is: measure its time there.
    update: (state, work, seconds=None, **extra_args) -> (state, metrics). Runs
      the exchange and the optimizer. `seconds`, float32[workers], is the time
      of each worker for `work`; the metrics carry all of them to everyone.
    step: (state, batch, counts, **extra_args) -> (state, metrics). Runs both in
      one program, for steps that are not timed.

  Example:
    >>> import optax
    >>> from jaxmotion import hetero, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> tx = optax.chain(transforms.exchange("data"), optax.sgd(0.5))
    >>> uneven = hetero.uneven_data_parallel(
    ...   lambda w, x: (jnp.sum((x - w) ** 2), x.size), tx, mesh
    ... )
    >>> state = uneven.init(jnp.zeros(()))
    >>> batch, _ = hetero.assign_microbatches(
    ...   np.arange(6.0), (3,), microbatch=2, max_microbatches=4
    ... )
    >>> work = uneven.work(state, batch, (3,))
    >>> state, metrics = uneven.update(state, work, seconds=jnp.array([0.1]))
    >>> float(state.params), metrics.counts.tolist()
    (2.5, [6.0])
  """

  init: Callable[..., UnevenState]
  work: Callable[..., core.PerWorker]
  update: Callable[..., tuple[UnevenState, Metrics]]
  step: Callable[..., tuple[UnevenState, Metrics]]


def uneven_data_parallel(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  stateful: bool = False,
  specs: PyTree | None = None,
  donate: bool = True,
) -> UnevenStep:
  r"""Makes a data-parallel step in which workers do unequal amounts of work.

  Worker r loops over its first n_r microbatches. The exchange in `tx` gets the
  worker's mean gradient, weighted by its number of examples, so that

  .. math::
    g = \frac{\sum_r \sum_{j<n_r} \nabla total_{rj}}
             {\sum_r \sum_{j<n_r} count_{rj}}

  for any counts: the gradient of the mean over all examples. The weight is
  applied before a codec adds its error memory. So the sum of what is sent over
  time equals the sum of the gradients, even while counts change. A worker
  without work takes part with weight zero.

  One program is compiled for all counts, because they are data: the numbers of
  iterations of a loop. There is no collective in the loop.

  Statistics (of batch normalization) start every microbatch from the same
  values. Those after the step are the mean of the microbatches' statistics,
  weighted by count, so they do not depend on which worker computed which
  microbatch.

  Args:
    loss_fn: (params, microbatch) -> (total, count): the sum of the losses, and
      the number of examples (or tokens, or the sum of weights) in that sum.
      With `stateful` (params, stats, microbatch) -> (total, count, stats). A
      microbatch is `batch` without its two leading axes; one whose count is
      0 or negative adds nothing.
    tx: optax chain with an `exchange` over `axis_name` and of op "mean".
    mesh: device mesh that has the axis.
    axis_name: the workers' axis, or a tuple of axes.
    stateful: whether there are statistics, floating-point arrays.
    specs: how parameters are sharded over axes of the mesh that are not the
      workers', as `data_parallel` takes it; give `exchange` the same.
    donate: whether `update` and `step` take the buffers of the state for their
      results, so that it exists once. It is deleted then: go on with the state
      that they return. False keeps it, for a notebook whose cells run twice.

  Returns:
    init, work, update and step; see `UnevenStep`. `batch` is a pytree of arrays
    of shape (workers, max_microbatches, ...), as `assign_microbatches` makes
    it; `counts` is int[workers] on the host, at most `max_microbatches` each.
    The state given to `update` and `step` is donated (see `donate`). Sums are
    made in float32 at least. On several CPU devices of one process, `update`
    and `step` wait until at most 4 steps are in flight.

  Raises:
    ValueError: the mesh has no such axis. The returned functions raise it for
      counts that the batch has no room for and for a `loss_fn` that returns
      something else. They also raise it for a `tx` that does not exchange
      gradients before they are used, and for a state that was donated before.

  Example:
    >>> import numpy as np
    >>> from jaxmotion import hetero, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss_fn(w, x):
    ...   return jnp.sum((x - w) ** 2), x.size
    >>> tx = optax.chain(transforms.exchange("data"), optax.sgd(0.5))
    >>> uneven = hetero.uneven_data_parallel(loss_fn, tx, mesh)
    >>> x, _ = hetero.assign_microbatches(
    ...   np.arange(6.0), (3,), microbatch=2, max_microbatches=4
    ... )
    >>> state, metrics = uneven.step(uneven.init(jnp.zeros(())), x, (3,))
    >>> float(state.params), metrics.counts.tolist()
    (2.5, [6.0])

  References:
    Moreno-Álvarez, Paoletti, Rico-Gallego and Haut, *Heterogeneous gradient
    computing optimization for scalable deep neural networks*, 2022 (HetGrad).
  """
  core.check_callable("loss_fn", loss_fn)
  noun = "an optax transformation"
  core.check_instance("tx", tx, optax.GradientTransformation, noun)
  core.check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  core.check_bool("stateful", stateful)
  core.check_bool("donate", donate)
  donated, donate_argnums = (("state",), (0,)) if donate else ((), ())
  in_flight = core.StepsInFlight(mesh)
  init_params, _ = transforms.data_parallel(
    loss_fn, tx, mesh, axis_name=axis_name, specs=specs
  )
  shardings = Shardings(mesh, axis_name, specs)
  workers = math.prod(mesh.shape[name] for name in core.axis_names(axis_name))
  split = P(axis_name)
  made: set[Any] = set()  # Structures and shapes of the states of `init`.

  def init(params: PyTree, stats: PyTree = None) -> UnevenState:
    if stateful != (stats is not None):
      raise ValueError(
        "`stats` must be given if `stateful` and only then, got"
        f" {'none' if stats is None else 'some'} for {stateful}."
      )
    core.check_arrays("params", params)
    params, opt_state = init_params(params)
    state = UnevenState(params, opt_state, _replicate_stats(stats, mesh))
    made.add(_list_shapes(state))
    return state

  def sum_microbatches(
    model: _Model, batch: PyTree, counts: Array
  ) -> core.PerWorker:
    param_specs = shardings.params(model.params)
    args = shardings.place(
      (model, batch, counts), (_Model(param_specs, P()), split, split)
    )
    local_work = functools.partial(_local_work, loss_fn)
    work = core.map_local_work(
      local_work, mesh, axis_name, (P(), split, split)
    )(*args)
    grads = shardings.place(work.value.grads, shardings.grads(model.params))
    return core.PerWorker(work.value._replace(grads=grads))

  def update(
    state: UnevenState, work: core.PerWorker, seconds: Array, extra_args: PyTree
  ) -> tuple[UnevenState, Metrics]:
    # Where the arrays are, and what the map over workers sees of that.
    placed = UnevenState(
      shardings.params(state.params),
      shardings.state(state.opt_state, state.params),
      P(),
    )
    own = UnevenState(P(), core.state_specs(state.opt_state, axis_name), P())
    sum_specs: Any = (shardings.grads(state.params), split, split, split)
    work_spec = core.PerWorker(_accumulate.MicrobatchSums(*sum_specs))
    args = shardings.place(
      (state, work, seconds, extra_args), (placed, work_spec, split, P())
    )
    state, metrics = jax.shard_map(
      functools.partial(_local_update, tx, axis_name),
      in_specs=(own, split, split, P()),
      out_specs=(own, P()),
      **shardings.map_options,
    )(*args)
    return shardings.place(state, placed), metrics

  @functools.partial(jax.jit, donate_argnums=donate_argnums)
  def jitted_step(
    state: UnevenState, batch: PyTree, counts: Array, extra_args: PyTree
  ) -> tuple[UnevenState, Metrics]:
    sums = sum_microbatches(_get_model(state), batch, counts)
    return update(state, sums, jnp.zeros(workers), extra_args)

  jitted_work = jax.jit(sum_microbatches)
  jitted_update = jax.jit(update, donate_argnums=donate_argnums)

  def checked_work(
    state: UnevenState, batch: PyTree, counts: Sequence[int]
  ) -> core.PerWorker:
    _check_state(state, made)
    checked = _check_batch(batch, counts, workers)
    core.check_buffers({"state": state, "batch": batch})
    return jitted_work(_get_model(state), batch, checked)

  def checked_update(
    state: UnevenState,
    work: core.PerWorker,
    seconds: Any = None,
    **extra_args: Any,
  ) -> tuple[UnevenState, Metrics]:
    if seconds is None:
      seconds = np.zeros(workers, np.float32)
    if np.shape(seconds) != (workers,):
      raise ValueError(
        f"`seconds` must be float32[{workers}], got {seconds!r}."
      )
    _check_state(state, made)
    core.check_instance("work", work, core.PerWorker, "what `work` returned")
    args = {"state": state, "work": work, "seconds": seconds}
    core.check_buffers(args | extra_args, donated)
    in_flight.wait(state)
    state, metrics = jitted_update(state, work, seconds, extra_args)
    in_flight.add(metrics)
    return state, metrics

  def checked_step(
    state: UnevenState, batch: PyTree, counts: Sequence[int], **extra_args: Any
  ) -> tuple[UnevenState, Metrics]:
    _check_state(state, made)
    checked = _check_batch(batch, counts, workers)
    core.check_buffers({"state": state, "batch": batch} | extra_args, donated)
    in_flight.wait(state)
    state, metrics = jitted_step(state, batch, checked, extra_args)
    in_flight.add(metrics)
    return state, metrics

  return UnevenStep(init, checked_work, checked_update, checked_step)


def _check_state(state: UnevenState, made: Collection[Any]) -> None:
  """Raises unless a state has the shapes of one that `init` made."""
  source = "the UnevenState that `init` or the last step returned"
  core.check_instance("state", state, UnevenState, source)
  found = _list_shapes(state)
  if made and found not in made:
    raise ValueError(f"`state` must be {source}, got shapes {found[1]}.")


def _list_shapes(tree: PyTree) -> tuple[Any, tuple[Any, ...]]:
  leaves, structure = jax.tree.flatten(tree)
  return structure, tuple(map(jnp.shape, leaves))


def _replicate_stats(stats: PyTree, mesh: Mesh) -> PyTree:
  """Copies statistics to every device."""
  for path, leaf in core.named_leaves(stats):
    core.check_float(f"stats/{path}", leaf)
  copy = functools.partial(jax.tree.map, jnp.copy)
  everywhere = jax.sharding.NamedSharding(mesh, P())
  return jax.jit(copy, out_shardings=everywhere)(stats)


class _Model(NamedTuple):
  """Arguments of a loss function that come from the training state."""

  params: PyTree
  stats: PyTree


def _get_model(state: UnevenState) -> _Model:
  return _Model(state.params, state.stats)


def _local_work(
  loss_fn: Callable[..., Any],
  model: _Model,
  batch: PyTree,
  counts: Array,
) -> core.PerWorker:
  batch = jax.tree.map(lambda a: a[0], batch)
  return core.pack_worker(
    _accumulate.accumulate_microbatches(loss_fn, *model, batch, counts[0])
  )


def _local_update(
  tx: optax.GradientTransformation,
  axis_name: AxisName,
  state: UnevenState,
  work: core.PerWorker,
  seconds: Array,
  extra_args: PyTree,
) -> tuple[UnevenState, Metrics]:
  sums: _accumulate.MicrobatchSums = core.unpack_worker(work)
  params, opt_state, stats = state
  # A worker without work has sums of zero: divide by 1 instead of 0.
  inverse = 1 / jnp.where(sums.count == 0, 1, sums.count)
  grads = jax.tree.map(
    lambda a, p: (a * inverse.astype(a.dtype)).astype(p.dtype),
    sums.grads,
    params,
  )
  extra_args = {"weight": sums.count, **extra_args}
  params, opt_state = update_params(
    tx, grads, opt_state, params, extra_args, axis_name
  )
  metrics = _gather_metrics(sums, seconds[0], axis_name)
  stats = _average_stats(stats, sums.stats, metrics.counts.sum(), axis_name)
  return UnevenState(params, opt_state, stats), metrics


def _gather_metrics(
  sums: _accumulate.MicrobatchSums, seconds: Array, axis_name: AxisName
) -> Metrics:
  """Gathers every worker's loss, count and time, in one collective."""
  own = jnp.stack([sums.total, sums.count, seconds])
  rows = jnp.zeros((core.axis_size(axis_name), 3)).at[
    core.worker_index(axis_name)
  ]
  total, counts, all_seconds = lax.psum(rows.set(own), axis_name).T
  loss = total.sum() / jnp.where(counts.sum() == 0, 1, counts.sum())
  return Metrics(loss, counts, all_seconds)


def _average_stats(
  old: PyTree, sums: PyTree, count: Array, axis_name: AxisName
) -> PyTree:
  """Returns the mean of the statistics by count; the old ones for count 0."""

  def average_leaf(a: Array, total: Array) -> Array:
    mean = lax.psum(total, axis_name) / jnp.where(count == 0, 1, count)
    return jnp.where(count == 0, a, mean.astype(a.dtype))

  return jax.tree.map(average_leaf, old, sums)


def _check_batch(
  batch: PyTree, counts: Sequence[int], workers: int
) -> np.ndarray:
  """Returns the counts; raises unless the batch has room for them."""
  shapes = {np.shape(a)[:2] for a in jax.tree.leaves(batch)}
  if len(shapes) == 1:
    (shape,) = shapes
    if len(shape) == 2 and shape[0] == workers:
      return _assign.check_counts(counts, shape[1], workers)
  raise ValueError(
    f"`batch` must have leaves of one shape ({workers} workers,"
    f" max_microbatches, ...), got {sorted(shapes)} along the two leading axes."
  )
