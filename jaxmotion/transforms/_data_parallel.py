"""Data-parallel training step made from a loss function."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.collectives.extend import (
  branch_after,
  check_rows,
  update_params,
)
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import (
  _averages,
  _compiled_step,
  _delayed_step,
  _init_state,
  _local_work,
  _model_state,
  _placement,
  _sender,
  _shardings,
  _state_maker,
  _step_arguments,
  _step_keys,
)


def data_parallel(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  has_aux: bool = False,
  model_state: str | None = None,
  weight_fn: Callable[..., Any] | None = None,
  microbatches: int = 1,
  specs: PyTree | None = None,
  mean_loss: bool = True,
  delay: int = 0,
  overlap: str | None = None,
  donate: bool = True,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Makes `init` and `step` for training over a mesh axis.

  Args:
    loss_fn: (params, batch) -> scalar mean over the worker's own batch, or
      (scalar, aux) with `has_aux`. With `model_state` it is
      (params, model_state, batch) -> (scalar, model_state), or
      (scalar, (model_state, aux)). It also takes `key=` if `step` is given one.
    tx: optax chain with an `exchange` over `axis_name`.
    mesh: device mesh that has the axis.
    axis_name: the axis (or axes) that the batch is split over.
    has_aux: whether `loss_fn` returns auxiliary values. Floating-point scalars
      are averaged over workers. Other values, such as counts and logits, get a
      leading axis of workers.
    model_state: what becomes of state that `loss_fn` returns anew, such as
      batch statistics. "mean" averages floating-point leaves over workers, in
      one sum with the loss. Integers, bools and keys have no mean: they must
      not depend on the batch, which is checked, and so are equal. "local"
      keeps each worker's own, as a `PerWorker` with a leading axis of workers.
      None: there is no such state. A step that `skip_nonfinite` or
      `exchange(nonfinite="skip")` skips keeps the floating-point leaves too.
    weight_fn: batch -> the worker's weight, such as the number of tokens that
      are no padding, for a `loss_fn` that is a mean over these. Gradient, loss,
      averaged scalars and model state are then the weighted means: those of the
      whole batch. A worker of weight 0 adds nothing, even if its loss is not
      finite. The exchange gets the weight as `weight=`. None: all weigh the
      same.
    microbatches: number of parts that a worker's batch is computed in, one
      after the other, to save memory. Their gradients are averaged in float32
      and exchanged once. Model state goes from one part to the next. Part i
      gets the key `fold_in(key, i)`. Auxiliary values that are not averaged
      have axes of workers and microbatches.
    specs: how parameters are sharded over axes of the mesh that are not the
      workers' (tensor parallelism). A tree of PartitionSpecs like the
      parameters, or a prefix of it. Give `exchange` the same. Parameters and
      moments keep these shardings, and XLA's partitioner computes `loss_fn` as
      it does under `jit`. None: parameters are replicated.
    mean_loss: whether the loss (and floating-point scalars of the auxiliary
      values) are the workers' mean. That mean is a collective of its own,
      which costs round trips and makes workers wait for one another. Without
      it each value has a leading axis of workers, and a process holds only its
      own workers' values.
    delay: 0, or 1 to apply the mean gradient of a step one step later, while
      the next gradient is computed at the parameters of before. Exchange and
      computation then take the longer of their times, not the sum. Stale
      gradients may need a lower learning rate. The first step applies zeros,
      and the last gradient is not applied. Not for `model_state`, and not for
      a chain that needs `value=`.
    overlap: how the exchange runs beside the computation. "program": both are
      one program, which compilers for GPU and TPU overlap. "thread": second
      threads of each process send, which overlaps on CPU; a process then has
      one device. Without a `delay` the step is cut into programs. Gradients of
      the last layers are encoded and sent while those of earlier layers are
      computed. Between two hosts, two sums are on the link at a time. A step
      with host callbacks stays one program. None chooses "thread" between CPU
      hosts.
    donate: whether `step` takes the buffers of `params`, `model_state` and
      `opt_state` for its results, so that all exist once. They are deleted
      then: go on with what `step` returned. False keeps them, for a notebook
      whose cells run twice.

  Returns:
    init: params -> (params, opt_state), placed on the mesh; per-worker state
      is split over the axis, all else replicated. The result is a copy. With
      `model_state`, (params, model_state) -> (params, model_state, opt_state).
    step: (params, opt_state, batch, *, key=None, **extra_args) ->
      (params, opt_state, loss or (loss, aux)), jitted. With `model_state`,
      (params, model_state, opt_state, batch, *, key=None, **extra_args) ->
      (params, model_state, opt_state, loss or (loss, aux)). What a step returns
      is what the next one takes, in the same order. Buffers are donated (see
      `donate`). Every leaf of `batch` is split along its leading axis; all
      workers get its scalars. `key` is a key of `jax.random`; `loss_fn` gets
      `fold_in(fold_in(key, count), worker)`, in which `count` is that of the
      exchange's state. So one key serves all steps: every worker and every step
      draws its own dropout mask.
      Extra arguments go to `tx.update`: scalars that all workers share. A chain
      that needs `value=` gets the workers' mean loss (`mean_loss`). To log the
      norm of the mean gradient, put `optax.snapshot("norm", optax.tree.norm)`
      after the exchange and read `optax.tree.get(opt_state, "norm")`. On
      several CPU devices of one process, a call waits until at most 4 steps are
      in flight. XLA:CPU can hang when a loop runs further ahead.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis; an unknown `model_state`; a `delay`
      with a `model_state`; threads for several devices of a process. `step`
      raises it for a `tx` that does not exchange gradients before they are
      used. It raises it for a batch that workers and `microbatches` do not
      divide. It also raises it for a `loss_fn` that returns something else, and
      for `params`, a `model_state` or an `opt_state` that was donated before.

  Example:
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> tx = optax.chain(
    ...   transforms.exchange("data", codecs.uniform(bits=8)), optax.sgd(0.1)
    ... )
    >>> init, step = data_parallel(loss_fn, tx, mesh)
    >>> params, opt_state = init({"w": jnp.zeros((2, 1))})
    >>> batch = {"x": jnp.eye(2), "y": jnp.ones((2, 1))}
    >>> params, opt_state, loss = step(params, opt_state, batch)
    >>> float(loss)
    1.0
  """
  core.check_callable("loss_fn", loss_fn)
  tx = _placement.as_transformation(tx)
  core.check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  core.check_axis_name("axis_name", axis_name)
  _local_work.check_loss_options(has_aux, model_state, weight_fn, microbatches)
  core.check_bool("mean_loss", mean_loss)
  core.check_int("delay", delay, 0, 1)
  core.check_choice("overlap", overlap, _sender.OVERLAPS)
  core.check_bool("donate", donate)
  _init_state.check_axes(mesh, axis_name)
  if delay and model_state is not None:
    raise ValueError(
      "`delay` must be 0 with a `model_state`, which a step returns before its "
      f"gradient is known to be finite, got {delay}."
    )
  shardings = _shardings.Shardings(mesh, axis_name, specs)
  map_options = shardings.map_options
  stateful, is_local = model_state is not None, model_state == "local"
  compute_work = _local_work.make_local_work(
    loss_fn,
    has_aux=has_aux,
    stateful=stateful,
    weight_fn=weight_fn,
    microbatches=microbatches,
  )
  workers = math.prod(mesh.shape[name] for name in core.axis_names(axis_name))
  split = P(axis_name)
  model_spec = split if is_local else P()

  @jax.jit
  def make_all(params: PyTree, model: PyTree) -> tuple[PyTree, PyTree, PyTree]:
    # A weak type, as that of `jnp.full`, would not last: `step` would be
    # compiled again after the first update.
    params, model = jax.tree.map(lambda a: a.astype(a.dtype), (params, model))
    param_specs = shardings.params(params)
    params, model = shardings.place((params, model), (param_specs, P()))

    # A map, so that parameters are on the mesh whatever the state is.
    def copy(params: PyTree, model: PyTree) -> tuple[PyTree, PyTree]:
      params, model = jax.tree.map(jnp.copy, (params, model))
      return params, core.pack_worker(model) if is_local else model

    params, model = jax.shard_map(
      copy, in_specs=P(), out_specs=(P(), model_spec), **map_options
    )(params, model)
    params = shardings.place(params, param_specs)
    opt_state = _init_state.make_state(maker.init, params, axis_name, shardings)
    return params, model, opt_state

  def init_params(params: PyTree) -> tuple[PyTree, PyTree]:
    core.check_arrays("params", params)
    _placement.check_trained(params)
    shardings.check_params(params)
    core.check_buffers({"params": params})
    params = core.put_on_mesh(params, mesh, shardings.params(params))
    params, _, opt_state = make_all(params, None)
    return params, opt_state

  def init_model(
    params: PyTree, model_state: PyTree
  ) -> tuple[PyTree, PyTree, PyTree]:
    core.check_arrays("params", params)
    _placement.check_trained(params)
    shardings.check_params(params)
    core.check_arrays("model_state", model_state)
    core.check_buffers({"params": params, "model_state": model_state})
    params, model_state = core.put_on_mesh(
      (params, model_state), mesh, (shardings.params(params), P())
    )
    return make_all(params, model_state)

  def compute_own(
    params: PyTree, model: PyTree, batch: PyTree, keys: PyTree
  ) -> _local_work.LocalWork:
    key = None if keys is None else keys[0]
    if is_local:
      core.check_instance(
        "model_state",
        model,
        core.PerWorker,
        "the PerWorker that `init` returned",
      )
      model = core.unpack_worker(model)
    elif stateful:
      _model_state.check_equal(
        lambda fixed, own: compute_work(*fixed, *own).model_state,
        (params, model),
        (batch, key),
        axis_name,
      )
    work = compute_work(params, model, batch, key)
    return jax.tree.map(lambda a: jnp.expand_dims(a, 0), work)

  def update_all(
    params: PyTree,
    model: PyTree,
    opt_state: PyTree,
    work: _local_work.LocalWork,
    extra_args: PyTree,
  ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    grads = jax.tree.map(lambda g: jnp.squeeze(g, 0), work.grads)
    if work.weight is not None:
      extra_args = extra_args | {"weight": work.weight[0]}
    metrics, new_model = _averages.average_work(
      work,
      model,
      axis_name,
      model_state=model_state,
      mean_loss=mean_loss,
    )
    loss = metrics[0] if has_aux else metrics
    averaged = new_model if model_state == "mean" else None
    with branch_after((metrics if mean_loss else None, averaged)):
      params, new_state = update_params(
        tx,
        grads,
        opt_state,
        params,
        extra_args,
        axis_name,
        loss if mean_loss else None,
      )
    if stateful:
      new_model = _model_state.keep_if_skipped(
        new_model, model, opt_state, new_state
      )
    return params, new_model, new_state, metrics

  def check_update(opt_state: PyTree, extra_args: PyTree) -> None:
    # An exchange has a row for each device, if devices have shards.
    check_rows(opt_state, [workers, mesh.size])
    if weight_fn is not None and "weight" in extra_args:
      raise ValueError(
        "`weight` must not be given beside `weight_fn`, got "
        f"{extra_args['weight']!r}."
      )

  def compute_all(
    params: PyTree,
    model: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    key: Array | None,
  ) -> _local_work.LocalWork:
    batch_specs = _step_arguments.split_specs(
      "batch", batch, mesh, axis_name, microbatches
    )
    _step_keys.check_step_key(key)
    keys = None
    if key is not None:
      keys = _step_keys.make_worker_keys(key, opt_state, workers)
    args = shardings.place(
      (params, model, batch, keys),
      (shardings.params(params), model_spec, batch_specs, split),
    )
    work = core.map_local_work(
      compute_own, mesh, axis_name, (P(), model_spec, batch_specs, split)
    )(*args)
    grads = shardings.place(work.grads, shardings.grads(params))
    return work._replace(grads=grads)

  def run_step(
    params: PyTree,
    model: PyTree,
    opt_state: PyTree,
    batch: PyTree,
    key: Array | None,
    extra_args: PyTree,
  ) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    check_update(opt_state, extra_args)
    # Two maps, of which XLA makes one program. Only the second checks what
    # varies over workers, so that replicas that could differ are an error.
    work = compute_all(params, model, opt_state, batch, key)
    param_specs = shardings.params(params)
    state_spec = shardings.state(opt_state, params)
    params, model, opt_state, extra_args = shardings.place(
      (params, model, opt_state, extra_args),
      (param_specs, model_spec, state_spec, P()),
    )
    metric_specs = _averages.find_metric_specs(
      work.metrics, axis_name, mean_loss
    )
    own_specs = core.state_specs(opt_state, axis_name)
    params, model, opt_state, metrics = jax.shard_map(
      update_all,
      in_specs=(P(), model_spec, own_specs, split, P()),
      out_specs=(P(), model_spec, own_specs, metric_specs),
      **map_options,
    )(params, model, opt_state, work, extra_args)
    params, opt_state = shardings.place(
      (params, opt_state), (param_specs, state_spec)
    )
    return params, model, opt_state, metrics

  init = init_model if stateful else init_params
  if not delay:
    maker = _state_maker.StateMaker(tx.init, by_device=False)
    step = _compiled_step.compile_run(
      run_step,
      mesh,
      stateful=stateful,
      donate=donate,
      overlaps=_sender.choose_overlap(mesh, axis_name, overlap) == "thread",
    )
    return maker.attach(init), step
  delayed = _delayed_step.DelayedUpdate(
    tx, axis_name, shardings, check_update, mean_loss, weight_fn is not None
  )
  maker = _state_maker.StateMaker(delayed.init, by_device=False)

  def compute(
    params: PyTree, opt_state: PyTree, batch: PyTree, key: Array | None
  ) -> _local_work.LocalWork:
    return compute_all(params, None, opt_state, batch, key)

  call = None
  if _sender.choose_overlap(mesh, axis_name, overlap) == "thread":
    call = _delayed_step.make_threaded_call(
      compute, delayed, _sender.Sender(mesh), donate=donate
    )
  run = _delayed_step.make_delayed_run(compute, delayed)
  step = _compiled_step.compile_run(
    run, mesh, stateful=False, donate=donate, call=call
  )
  return maker.attach(init), step
