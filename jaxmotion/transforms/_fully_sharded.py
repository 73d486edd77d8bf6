"""Training step whose parameters and optimizer are sharded over workers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives import all_reduce, all_reduce_hierarchical
from jaxmotion.collectives.extend import all_axes, check_batch
from jaxmotion.core import (
  Array,
  AxisName,
  PerWorker,
  PyTree,
  Split,
  check_arrays,
  check_axis_name,
  check_bool,
  check_buffers,
  check_callable,
  check_instance,
  check_int,
  map_local_work,
  pack_worker,
  place_tree,
  state_specs,
  to_varying,
  unpack_worker,
)
from jaxmotion.transforms._compiled_step import compile_step
from jaxmotion.transforms._fully_sharded_plan import (
  ShardPlan,
  compile_pattern,
)
from jaxmotion.transforms._init_state import check_axes
from jaxmotion.transforms._parts import init_parts, update_parts
from jaxmotion.transforms._placement import as_transformation, check_trained
from jaxmotion.transforms._shard_layout import LeafCut
from jaxmotion.transforms._weight_part import check_regather


class FullyShardedState(NamedTuple):
  """State of a `fully_sharded` step.

  Attributes:
    count: int32[], updates so far.
    inner: state of the optimizer, of each worker's part.
    error: error memory of each leaf that is cut, each worker's own; None
      without memory.
  """

  count: Array  # type: ignore[assignment]
  inner: Split
  error: PerWorker


def fully_sharded(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation | optax.MultiSteps,
  mesh: Mesh,
  *,
  axis_name: AxisName = "data",
  weight_codec: Codec | None = None,
  gradient_codec: Codec | None = None,
  error_feedback: bool = False,
  local_axis: AxisName | None = None,
  local_codec: Codec | None = None,
  regather: bool | str = True,
  stacked: str | None = None,
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
      `gather_params`, or wrap blocks in `gather_block`.
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
      alone; a device keeps the words that it got from other hosts, in the size
      that the codec gives them, divided by the devices of a host. False:
      nothing; a device keeps the words of all weights.
    stacked: regular expression for paths of leaves whose first dimension counts
      the layers of a `lax.scan`; that dimension is not cut.
    seed: seed of stochastic rounding and sampling, in [0, 2^32).
    donate: whether `step` takes the buffers of `params` and `opt_state`.

  Returns:
    init: params -> (params, opt_state), placed on the mesh in parts: ordinary
      arrays of the parameters' shapes.
    step: (params, opt_state, batch, **extra_args) -> (params, opt_state, loss),
      jitted. Every leaf of `batch` is split along its leading axis. Extra
      arguments go to `tx.update`.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis, an axis is in both `axis_name` and
      `local_axis`, a codec has state or joins leaves, `stacked` is no regular
      expression, or `local_codec` or `regather="local"` is given without
      `local_axis`. `init` raises it for a `stacked` that
      matches no leaf. `step` raises it for a batch that the
      workers do not divide, and for a `tx` that looks across elements.

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
  check_callable("loss_fn", loss_fn)
  tx = as_transformation(tx)
  check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  check_axis_name("axis_name", axis_name)
  if local_axis is not None:
    check_axis_name("local_axis", local_axis)
    check_axes(mesh, local_axis, "local_axis")
  check_axes(mesh, axis_name)
  axes = all_axes(axis_name, local_axis, local_codec)
  check_regather(regather, local_axis)
  for name, codec in (
    ("weight_codec", weight_codec),
    ("gradient_codec", gradient_codec),
    ("local_codec", local_codec),
  ):
    if codec is not None:
      check_codec(name, codec, trees=True)
  check_bool("error_feedback", error_feedback)
  check_int("seed", seed, 0, 2**32 - 1)
  check_bool("donate", donate)
  plan = ShardPlan(
    axis_name,
    local_axis,
    mesh,
    weight_codec,
    gradient_codec,
    local_codec,
    regather,
    compile_pattern(stacked),
    seed,
  )
  inner = optax.with_extra_args_support(tx)
  split = P(axes)

  def init_local(parts: PyTree, cuts: list[LeafCut]) -> FullyShardedState:
    memory = [
      jnp.zeros(cut.shard_shape(plan.count_senders()), jnp.float32)
      for cut in cuts
      if error_feedback and cut.dimension is not None
    ]
    return FullyShardedState(
      jnp.zeros((), jnp.int32),
      init_parts(inner, parts, cuts, axes),
      pack_worker(to_varying(memory, axes)),
    )

  def init(params: PyTree) -> tuple[PyTree, FullyShardedState]:
    check_arrays("params", params)
    check_trained(params)
    check_buffers({"params": params})
    params = jax.tree.map(jnp.asarray, params)
    plan.check_stacked(params)
    cuts = plan.cut_leaves(params)
    specs = plan.param_specs(params, cuts)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def copy(params: PyTree) -> PyTree:
      return jax.tree.map(lambda a: jnp.copy(a.astype(a.dtype)), params)

    params = jax.jit(copy, out_shardings=shardings)(params)
    found: list[PyTree] = []

    def trace_init(parts: PyTree) -> Array:
      found.append(jax.tree.map(jax.typeof, init_local(parts, cuts)))
      return jnp.zeros(())

    jax.eval_shape(
      jax.shard_map(trace_init, mesh=mesh, in_specs=(specs,), out_specs=P()),
      params,
    )
    make_state = jax.shard_map(
      lambda parts: init_local(parts, cuts),
      mesh=mesh,
      in_specs=(specs,),
      out_specs=state_specs(found[0], axes),
    )
    return params, jax.jit(make_state)(params)

  def compute_own(
    parts: PyTree, count: Array, error: PerWorker, batch: PyTree, cuts: Any
  ) -> tuple[PyTree, PyTree, PyTree]:
    """Returns a worker's loss, its part of the gradient and its memory."""
    errors = unpack_worker(error)
    keys = plan.leaf_keys(parts, cuts, count)

    def own_loss(parts: PyTree, errors: list[Array]) -> Array:
      return loss_fn(plan.wrap_parts(parts, errors, keys, cuts), batch)

    loss, (grads, changes) = jax.value_and_grad(own_loss, argnums=(0, 1))(
      parts, errors
    )
    errors = jax.tree.map(jnp.add, errors, changes)
    return jax.tree.map(lambda a: jnp.expand_dims(a, 0), (loss, grads, errors))

  def update_own(
    parts: PyTree,
    state: FullyShardedState,
    own: tuple[PyTree, PyTree, PyTree],
    extra_args: dict[str, Any],
    cuts: list[LeafCut],
  ) -> tuple[PyTree, FullyShardedState, Array]:
    loss, grads, errors = jax.tree.map(lambda a: jnp.squeeze(a, 0), own)
    is_cut = [cut.dimension is not None for cut in cuts]
    grads = _average_whole(grads, is_cut, axis_name, local_axis)
    changes, new = update_parts(
      inner, grads, state.inner, parts, is_cut, axes, extra_args
    )
    state = FullyShardedState(
      optax.safe_increment(state.count),
      new,
      pack_worker(to_varying(errors, axes)),
    )
    parts = optax.apply_updates(parts, changes)
    return parts, state, lax.pmean(loss, axes)

  def step(
    params: PyTree,
    opt_state: FullyShardedState,
    batch: PyTree,
    **extra_args: Any,
  ) -> tuple[PyTree, FullyShardedState, Array]:
    check_instance(
      "opt_state", opt_state, FullyShardedState, "what `init` returned"
    )
    check_batch(batch, mesh, axes)
    cuts = plan.cut_leaves(params)
    part_specs = plan.param_specs(params, cuts)
    specs = state_specs(opt_state, axes)
    params, opt_state, batch, extra_args = place_tree(
      (params, opt_state, batch, extra_args),
      mesh,
      (part_specs, specs, split, P()),
    )
    own = map_local_work(
      functools.partial(compute_own, cuts=cuts),
      mesh,
      axes,
      (part_specs, P(), split, split),
    )(params, opt_state.count, opt_state.error, batch)
    return jax.shard_map(
      functools.partial(update_own, cuts=cuts),
      mesh=mesh,
      in_specs=(part_specs, specs, split, P()),
      out_specs=(part_specs, specs, P()),
    )(params, opt_state, own, extra_args)

  names = ("params", "opt_state", "batch")
  return init, compile_step(step, names, mesh, donate)


def _average_whole(
  grads: PyTree,
  is_cut: list[bool],
  axis_name: AxisName,
  local_axis: AxisName | None,
) -> PyTree:
  """Returns gradients of which those of whole leaves are the workers' mean."""
  leaves = jax.tree.leaves(grads)
  treedef: Any = jax.tree.structure(grads)
  whole = [i for i, own in enumerate(is_cut) if not own]
  if whole:
    own = [leaves[i] for i in whole]
    if local_axis is None:
      means, _ = all_reduce(own, axis_name)
    else:
      means, _ = all_reduce_hierarchical(own, axis_name, local_axis)
    for i, mean in zip(whole, means, strict=True):
      leaves[i] = mean
  return treedef.unflatten(leaves)
