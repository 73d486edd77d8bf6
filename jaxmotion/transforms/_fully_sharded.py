"""Training step whose parameters and optimizer are sharded over workers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives.extend import (
  NONFINITE_POLICIES,
  all_axes,
  apply_nonfinite_policy,
  check_rows,
  keep_update,
  run_with_loss,
)
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import (
  _averages,
  _compiled_step,
  _exchange_state,
  _fully_sharded_plan,
  _fully_sharded_work,
  _init_state,
  _local_work,
  _model_axes,
  _model_state,
  _parts,
  _placement,
  _shard_layout,
  _shardings,
  _state_maker,
  _step_arguments,
  _step_keys,
  _weight_part,
)


def fully_sharded(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation | optax.MultiSteps,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  weight_codec: codecs.Codec | None = None,
  gradient_codec: codecs.Codec | None = None,
  error_feedback: bool = False,
  local_axis: AxisName | None = None,
  local_codec: codecs.Codec | None = None,
  regather: bool | str = True,
  stacked: str | None = None,
  has_aux: bool = False,
  model_state: str | None = None,
  weight_fn: Callable[..., Any] | None = None,
  microbatches: int = 1,
  nonfinite: str = "propagate",
  specs: PyTree | None = None,
  seed: int = 0,
  donate: bool = True,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Makes `init` and `step` for training with sharded parameters (ZeRO-3).

  Each worker keeps a part of the parameters, of the gradient and of the
  optimizer's state. The loss function gathers whole weights block by block,
  through `weight_codec`; their gradient is reduced to parts through
  `gradient_codec`.

  With hosts of several devices, give `local_axis`: payloads then cross to
  another host once, and gradients are averaged within the host first.
  `regather="local"` keeps what a device got from other hosts, so the backward
  pass sends nothing between hosts but gradients (hpZ).

  A leaf is cut along its longest dimension that the workers divide. Leaves
  without one, and those of fewer than 64 elements per worker, stay whole; their
  gradients are averaged at full precision.

  Args:
    loss_fn: (params, batch) -> scalar mean over the worker's own batch. Leaves
      of `params` that are cut are `WeightPart`: make arrays of them by
      `gather_params`, or wrap blocks in `gather_block`. With `has_aux`,
      `model_state` or a `key` it is as for `data_parallel`.
    tx: optimizer that treats every element by itself, as for `sharded`.
    mesh: device mesh that has the axis.
    axis_name: the workers' axis, or a tuple of axes; that of the hosts if there
      is a `local_axis`.
    weight_codec: codec of weights, without state; None is full precision.
    gradient_codec: codec of gradients, without state; None is full precision.
    error_feedback: whether each worker remembers what encodings of its gradient
      left out. The memory is float32 of the size of all parameters, divided by
      the devices of a host if there is a `local_axis`.
    local_axis: the axis of the devices of one host, if `axis_name` is that of
      the hosts. The batch is split over both, parameters host by host.
    local_codec: codec of gradients within a host, without state; None is full
      precision.
    regather: what the backward pass of a `gather_block` gathers again. True:
      all its weights; nothing is kept. "local": from the devices of its host
      alone. A device keeps the words that it got from other hosts. Their size
      is that of the payload divided by the devices of a host. False: nothing; a
      device keeps the words of all weights.
    stacked: regular expression for paths of leaves whose first dimension counts
      the layers of a `lax.scan`; that dimension is not cut.
    has_aux: whether `loss_fn` returns auxiliary values, as for `data_parallel`.
    model_state: what becomes of state that `loss_fn` returns anew: "mean",
      "local" or None, as for `data_parallel`.
    weight_fn: batch -> the worker's weight in the mean, such as its number of
      tokens, as for `data_parallel`.
    microbatches: number of parts that a worker's batch is computed in, as for
      `data_parallel`. Each part gathers weights and reduces its gradient, so
      bytes grow with it: a whole gradient is never in memory.
    nonfinite: policy for gradients, and weights, that are not finite on some
      worker: "propagate", "skip" (all workers agree to keep parameters,
      moments, error memory and floating-point model state as they were) or
      "zero".
    specs: how parameters are sharded over axes of the mesh that are not the
      workers' (tensor parallelism), as for `data_parallel`. Workers cut other
      dimensions, and each device sends its own shard.
    seed: seed of stochastic rounding and sampling, in [0, 2^32).
    donate: whether `step` takes the buffers of `params` and `opt_state`.

  Returns:
    init: params -> (params, opt_state), placed on the mesh in parts: ordinary
      arrays of the parameters' shapes. With `model_state`,
      (params, model_state) -> (params, model_state, opt_state).
    step: (params, opt_state, batch, *, key=None, **extra_args) -> (params,
      opt_state, loss or (loss, aux)), jitted. With `model_state`, (params,
      model_state, opt_state, batch, ...) -> (params, model_state, opt_state,
      loss or (loss, aux)). `batch` is split, and `key` used, as by
      `data_parallel`. Extra arguments go to `tx.update`; one that needs
      `value=` gets the workers' mean loss.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis, or an axis is in both `axis_name` and
      `local_axis`. A codec has state or joins leaves. `stacked` is no regular
      expression. `local_codec` or `regather="local"` is given without
      `local_axis`, or `model_state` or `nonfinite` is unknown. `init` raises it
      for a `stacked` that matches no leaf and for a `tx` with an exchange.
      `step` raises it for a batch that workers and `microbatches` do not
      divide, and for a `tx` that looks across elements. It also raises it for a
      `loss_fn` that returns something else or uses a part by itself.

  Example:
    >>> from jaxmotion.transforms import gather_block
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> block = gather_block(lambda w, x: jnp.tanh(x @ w))
    >>> def loss_fn(params, batch):
    ...   return jnp.mean(block(params, batch) ** 2)
    >>> init, step = fully_sharded(loss_fn, optax.adam(1e-3), mesh)
    >>> params, opt_state = init(jnp.eye(8))
    >>> params, opt_state, loss = step(params, opt_state, jnp.zeros((4, 8)))
    >>> params.shape, float(loss)
    ((8, 8), 0.0)

  References:
    Rajbhandari et al., *ZeRO*, 2019; Wang et al., *ZeRO++*, 2023.
  """
  core.check_callable("loss_fn", loss_fn)
  tx = _placement.as_transformation(tx)
  core.check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  core.check_axis_name("axis_name", axis_name)
  if local_axis is not None:
    core.check_axis_name("local_axis", local_axis)
    _init_state.check_axes(mesh, local_axis, "local_axis")
  _init_state.check_axes(mesh, axis_name)
  axes = all_axes(axis_name, local_axis, local_codec)
  _weight_part.check_regather(regather, local_axis)
  for name, codec in (
    ("weight_codec", weight_codec),
    ("gradient_codec", gradient_codec),
    ("local_codec", local_codec),
  ):
    if codec is not None:
      check_codec(name, codec, trees=True)
  core.check_bool("error_feedback", error_feedback)
  _local_work.check_loss_options(has_aux, model_state, weight_fn, microbatches)
  core.check_choice("nonfinite", nonfinite, NONFINITE_POLICIES)
  core.check_int("seed", seed, 0, 2**32 - 1)
  core.check_bool("donate", donate)
  shardings = _shardings.Shardings(mesh, axes, specs)
  plan = _fully_sharded_plan.ShardPlan(
    axis_name,
    local_axis,
    mesh,
    weight_codec,
    gradient_codec,
    local_codec,
    error_feedback,
    regather,
    nonfinite,
    specs,
    _fully_sharded_plan.compile_pattern(stacked),
    seed,
  )
  inner = optax.with_extra_args_support(tx)
  split = P(axes)
  stateful, is_local = model_state is not None, model_state == "local"
  model_spec = split if is_local else P()

  compute_work = _fully_sharded_work.make_sharded_work(
    loss_fn,
    plan,
    has_aux=has_aux,
    stateful=stateful,
    weight_fn=weight_fn,
    microbatches=microbatches,
  )

  def init_anywhere(params: PyTree) -> _fully_sharded_plan.FullyShardedState:
    """Makes a worker's state on any mesh, in a map; see `checkpoint`."""
    here = plan._replace(mesh=jax.sharding.get_abstract_mesh())
    cuts = here.cut_leaves(params)
    leaves = [
      cut.own_part(x, axes)
      for x, cut in zip(jax.tree.leaves(params), cuts, strict=True)
    ]
    treedef: Any = jax.tree.structure(params)
    parts, model = treedef.unflatten(leaves), here.find_model(params)
    return _fully_sharded_plan.FullyShardedState(
      *_exchange_state.make_counts(),
      _parts.init_parts(inner, parts, cuts, axes, model),
      core.pack_worker(core.to_varying(here.make_memory(cuts), axes)),
    )

  def init_params(
    params: PyTree,
  ) -> tuple[PyTree, _fully_sharded_plan.FullyShardedState]:
    core.check_arrays("params", params)
    _placement.check_trained(params)
    shardings.check_params(params)
    core.check_buffers({"params": params})
    params = jax.tree.map(jnp.asarray, params)
    plan.check_stacked(params)
    cuts, model = plan.cut_leaves(params), plan.find_model(params)
    part_specs = plan.param_specs(params, cuts)
    params = _fully_sharded_plan.copy_to(params, mesh, part_specs)
    found: list[PyTree] = []

    def init_inner(parts: PyTree) -> PyTree:
      return _parts.init_parts(inner, parts, cuts, axes, model)

    def trace_init(parts: PyTree) -> Array:
      found.append(jax.tree.map(jax.typeof, init_inner(parts)))
      return jnp.zeros(())

    jax.eval_shape(
      jax.shard_map(
        trace_init, mesh=mesh, in_specs=(part_specs,), out_specs=P()
      ),
      params,
    )
    _placement.check_unexchanged(found[0])
    make_inner = jax.shard_map(
      init_inner, mesh=mesh, in_specs=(part_specs,), out_specs=found[0].specs()
    )

    def make_state(params: PyTree) -> _fully_sharded_plan.FullyShardedState:
      error = core.PerWorker(plan.make_memory(cuts, plan.count_workers()))
      return _fully_sharded_plan.FullyShardedState(
        *_exchange_state.make_counts(), make_inner(params), error
      )

    state_shardings = jax.tree.map(
      lambda spec: NamedSharding(mesh, spec),
      plan.state_specs(found[0], params, cuts),
    )
    return params, jax.jit(make_state, out_shardings=state_shardings)(params)

  def init_model(
    params: PyTree, model_state: PyTree
  ) -> tuple[PyTree, PyTree, _fully_sharded_plan.FullyShardedState]:
    core.check_arrays("model_state", model_state)
    core.check_buffers({"params": params, "model_state": model_state})
    params, opt_state = init_params(params)
    model = jax.tree.map(jnp.asarray, model_state)
    model = _fully_sharded_plan.copy_to(
      model, mesh, jax.tree.map(lambda a: P(), model)
    )
    if is_local:
      pack = jax.shard_map(
        core.pack_worker, mesh=mesh, in_specs=P(), out_specs=split
      )
      model = jax.jit(pack)(model)
    return params, model, opt_state

  def compute_own(
    parts: PyTree,
    opt_state: tuple[Array, core.PerWorker],
    model: PyTree,
    batch: PyTree,
    keys: PyTree,
    cuts: list[_shard_layout.LeafCut],
  ) -> _fully_sharded_work.ShardedWork:
    count, error = opt_state
    key = None if keys is None else keys[0]
    errors = core.unpack_worker(error)
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
        lambda fixed, own: (
          (
            compute_work(own[0], errors, count, fixed, *own[1:], cuts)
          ).local.model_state
        ),
        model,
        (parts, batch, key),
        axes,
      )
    work = compute_work(parts, errors, count, model, batch, key, cuts)
    return jax.tree.map(lambda a: jnp.expand_dims(a, 0), work)

  def update_own(
    parts: PyTree,
    model: PyTree,
    state: _fully_sharded_plan.FullyShardedState,
    work: _fully_sharded_work.ShardedWork,
    extra_args: dict[str, Any],
    cuts: list[_shard_layout.LeafCut],
    shard_model: _model_axes.ModelAxes,
  ) -> tuple[PyTree, PyTree, _fully_sharded_plan.FullyShardedState, PyTree]:
    metrics, new_model = _averages.average_work(
      work.local,
      model,
      axes,
      model_state=model_state,
    )
    squeezed = jax.tree.map(
      lambda a: jnp.squeeze(a, 0),
      (work.local.grads, work.errors, work.flags, work.local.weight),
    )
    grads, errors, flags, weight = squeezed
    is_cut = [cut.dimension is not None for cut in cuts]
    _, ok = apply_nonfinite_policy(nonfinite, (flags, weight), axes)
    grads = _fully_sharded_work.average_whole(
      grads, is_cut, axis_name, local_axis, shard_model
    )
    (changes, new_inner), _ = run_with_loss(
      lambda extra_args: _parts.update_parts(
        inner,
        grads,
        state.inner,
        parts,
        is_cut,
        axes,
        extra_args,
        shard_model,
      ),
      extra_args,
      metrics[0] if has_aux else metrics,
    )
    errors = core.pack_worker(core.to_varying(errors, axes))
    changes, (new_inner, errors) = keep_update(
      ok, changes, (new_inner, errors), (state.inner, state.error)
    )
    new = _fully_sharded_plan.FullyShardedState(
      *_exchange_state.count_update(state, ok), new_inner, errors
    )
    if stateful:
      new_model = _model_state.keep_if_skipped(new_model, model, state, new)
    return optax.apply_updates(parts, changes), new_model, new, metrics

  def run_step(
    params: PyTree,
    model: PyTree,
    opt_state: _fully_sharded_plan.FullyShardedState,
    batch: PyTree,
    key: Array | None,
    extra_args: dict[str, Any],
  ) -> tuple[PyTree, PyTree, _fully_sharded_plan.FullyShardedState, PyTree]:
    core.check_instance(
      "opt_state",
      opt_state,
      _fully_sharded_plan.FullyShardedState,
      "what `init` returned",
    )
    check_rows(opt_state, [plan.count_workers()])
    batch_specs = _step_arguments.split_specs(
      "batch", batch, mesh, axes, microbatches
    )
    if "weight" in extra_args:
      raise ValueError(
        "`weight` must be given by `weight_fn` of `fully_sharded`, got "
        f"{extra_args['weight']!r} for a step."
      )
    _step_keys.check_step_key(key)
    keys = None
    if key is not None:
      keys = _step_keys.make_worker_keys(key, opt_state, plan.count_workers())
    cuts = plan.cut_leaves(params)
    plan.check_memory(opt_state.error, cuts)
    part_specs = plan.param_specs(params, cuts)
    opt_specs = plan.state_specs(opt_state.inner, params, cuts)
    params, model, opt_state, batch, keys, extra_args = shardings.place(
      (params, model, opt_state, batch, keys, extra_args),
      (part_specs, model_spec, opt_specs, batch_specs, split, P()),
    )
    shard_model = plan.find_model(params)
    # Two maps, of which XLA makes one program. Only the second checks what
    # varies over workers, so that replicas that could differ are an error. It
    # is over the model's axes too, which the first leaves to `loss_fn`.
    work = core.map_local_work(
      functools.partial(compute_own, cuts=cuts),
      mesh,
      axes,
      (
        plan.param_specs(params, cuts, axes),
        (P(), split),
        model_spec,
        batch_specs,
        split,
      ),
    )(params, (opt_state.count, opt_state.error), model, batch, keys)
    metric_specs = _averages.find_metric_specs(work.local.metrics, axes)
    work_specs = _fully_sharded_work.find_work_specs(plan, params, cuts)
    work = shardings.place(work, work_specs)
    return jax.shard_map(
      functools.partial(update_own, cuts=cuts, shard_model=shard_model),
      mesh=mesh,
      in_specs=(part_specs, model_spec, opt_specs, work_specs, P()),
      out_specs=(part_specs, model_spec, opt_specs, metric_specs),
    )(params, model, opt_state, work, extra_args)

  maker = _state_maker.StateMaker(init_anywhere, local_axis is not None)
  init = init_model if stateful else init_params
  step = _compiled_step.compile_run(
    run_step, mesh, stateful=stateful, donate=donate
  )
  return maker.attach(init), step
