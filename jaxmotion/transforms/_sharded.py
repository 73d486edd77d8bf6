"""Optimizer whose state is sharded over workers, as an optax transformation."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, collectives, core, hosts
from jaxmotion.collectives import extend
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import (
  _exchange,
  _global_view,
  _model_axes,
  _shard_layout,
  _states,
)
from jaxmotion.transforms._model_axes import ModelAxes
from jaxmotion.transforms._shard_layout import LeafCut
from jaxmotion.transforms._states import ShardedState


@core.declare(
  tx=_states.as_transformation,
  gradient_codec=_states.any_codec,
  weight_codec=_states.any_codec,
  local_codec=_states.any_codec,
  nonfinite=core.choice(extend.NONFINITE_POLICIES),
  seed=core.seed,
)
def sharded(
  axis_name: AxisName,
  tx: optax.GradientTransformation | optax.MultiSteps,
  *,
  gradient_codec: codecs.Codec | None = None,
  weight_codec: codecs.Codec | None = None,
  nonfinite: str = "propagate",
  seed: int = 0,
  local_codec: codecs.Codec | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Runs an optimizer on each worker's part of the parameters (ZeRO-1 and 2).

  It takes the place of `optax.chain(exchange(...), tx)`. Worker `j` gets part
  `j` of the mean gradient, updates that part, and all gather the changes:

  .. math::
    g_j &= \frac{1}{N} \sum_r decode(encode(g_{r,j})) \\
    w_j &\leftarrow w_j + tx(g_j, w_j) \\
    p &\leftarrow p + gather_j \; decode(encode(w_j - p_j))

  `p` are the parameters that every worker holds, with the same bits. The master
  `w` and the moments exist once, as arrays of the parameters' shapes that are
  sharded over the axis. What an encoding of `w_j - p_j` leaves out is part of
  the next difference, so `p` follows `w` without error memory.

  Without a `weight_codec` there is no master: updates travel at full precision
  and the result is that of the optimizer on every worker.

  A leaf is cut along the dimension that needs the least padding to be divided
  by the workers, the first of several. State of a padded leaf has the padded
  shape. Leaves of fewer than 64 elements per worker stay whole: their gradients
  are averaged through `gradient_codec`, and all workers update them alike.

  Args:
    axis_name: the workers' axis, or a tuple of axes. With `HostAxes` gradients
      are reduced within a host first, and a payload crosses to another host
      once. Give the same `HostAxes` to `make_train_step`, `bind_mesh` and
      `state_specs`.
    tx: transformation that treats every element by itself, such as
      `optax.adamw`. `clip_by_global_norm` clips inside of it; that of optax
      would see the norm of a part. `testing.check_sharded` finds others that
      look across elements.
    gradient_codec: codec of the gradients' parts; None is full precision.
    weight_codec: codec of the differences; None is full precision without a
      master. It must be without state.
    nonfinite: policy for gradients, and weights, that are not finite on some
      worker: "propagate", "skip" (all workers agree to emit zeros and to keep
      moments, master and error memory as they were) or "zero".
    seed: seed of stochastic rounding and sampling, in [0, 2^32).
    local_codec: codec of gradients within a host; None is full precision.

  Returns:
    A transformation whose `init` and `update` run where the workers' axis is
    bound, or on gradients of `jaxmotion.value_and_grad`. `update` needs the
    parameters and also takes `weight=`, this worker's scalar weight in the
    mean. Nothing may come after it in a chain.

  Raises:
    TypeError: an argument of another type.
    ValueError: `seed` is outside [0, 2^32), or `nonfinite` is unknown. A codec
      joins leaves, `weight_codec` or `local_codec` has state, or feedback has
      the global form. `local_codec` is given without hosts. `update` raises it
      for a gradient that JAX has summed already and for the state of another
      number of workers.

  Example:
    >>> from jaxmotion import codecs
    >>> tx = sharded(
    ...   "data",
    ...   optax.adamw(3e-4),
    ...   gradient_codec=codecs.uniform(bits=8),
    ...   weight_codec=codecs.uniform(bits=4),
    ... )

  References:
    Rajbhandari et al., *ZeRO*, 2019; Jia et al., *SDP4Bit*, 2024 (differences
    of weights, two hops).
  """
  workers = core.worker_axes("axis_name", axis_name)
  if gradient_codec is None:
    gradient_codec = codecs.identity()
  options = _states.ShardedOptions(
    axis_name=core.comparable_axes(axis_name),
    gradient_codec=gradient_codec,
    weight_codec=weight_codec,
    tx=tx,
  )
  own = _Sharded(
    axis_name,
    workers,
    optax.with_extra_args_support(tx),
    gradient_codec,
    weight_codec,
    local_codec,
    nonfinite,
    seed,
  )
  # Every leaf is encoded by itself, so no codec joins some.
  init_fn, update_state = _model_axes.map_exchange(own, options, ())

  @core.declare(updates=core.typed_arrays, params=core.typed_arrays)
  def update_fn(
    updates: PyTree,
    state: ShardedState,
    params: PyTree | None = None,
    *,
    weight: Any = None,
    sending: hosts.Sending | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, ShardedState]:
    """Returns the changes of whole parameters, and the state after them."""
    _states.check_options(state, ShardedState, options)
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `sharded`, got None."
      )
    core.check_like("updates", updates, params, "`params`")
    args = {**extra_args, "weight": weight, "sending": sending}
    return update_state(updates, state, params, args)

  own = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  return _global_view.run_anywhere(own, workers)


@dataclasses.dataclass(frozen=True)
class _Plan(_shard_layout.CutTree):
  """Plan of one `sharded`: cuts of parameters, and codecs of every leaf."""

  gradient: list[extend.LeafCodec]
  local: list[extend.LeafCodec]
  weight: list[extend.LeafCodec]


class _Sharded(NamedTuple):
  """Arguments of one `sharded`, and what a device does with its shards."""

  axis_name: AxisName
  workers: AxisName
  tx: optax.GradientTransformationExtraArgs
  gradient_codec: codecs.Codec
  weight_codec: codecs.Codec | None
  local_codec: codecs.Codec | None
  nonfinite: str
  seed: int

  @property
  def has_master(self) -> bool:
    """Whether there is a copy of the parameters that is more precise."""
    return self.weight_codec is not None

  def init(self, params: PyTree, model: ModelAxes) -> ShardedState:
    """Makes the master, moments and error memory of one device's parts."""
    plan = self._make_plan(params, None, model)
    parts = self._own_parts(plan, params)
    # Copies: a step that donates parameters and state may not donate one twice.
    master = self._split_master(plan, jax.tree.map(jnp.copy, parts))
    codec_states = self._init_codecs(plan, params)
    return ShardedState(
      *_states.make_counts(),
      plan.mark(master),
      plan.init(self.tx, parts),
      core.pack_worker(core.to_varying(codec_states, self.workers)),
    )

  def update(
    self,
    updates: PyTree,
    state: ShardedState,
    params: PyTree,
    args: dict[str, Any],
    model: ModelAxes,
  ) -> tuple[PyTree, ShardedState]:
    """Returns the updates of one device's shards, and their new state."""
    _exchange.check_local(updates, self.workers)
    extra_args = dict(args)
    sending = extra_args.pop("sending")
    # All shards of a model are skipped, or none.
    (x, weight), ok = extend.apply_nonfinite_policy(
      self.nonfinite,
      (updates, extra_args.pop("weight")),
      (*core.axis_names(self.workers), *model.names),
    )
    index = core.worker_index(self.workers)
    key = core.make_key(self.seed, index).fold(state.count)
    x = extend.apply_weight(
      core.to_varying(x, self.workers), weight, self.workers, "mean"
    )
    plan = self._make_plan(params, key, model)
    for tree in (params, x):
      _check_known(plan, tree)
    parts = self._own_parts(plan, params)
    self._check_state(plan, state, parts)
    means, codec_state = self._reduce(plan, x, state.codec_state, key, sending)
    grads = jax.tree.map(lambda mean, p: mean.astype(p.dtype), means, parts)
    master = state.master.value if self.has_master else parts
    changes, inner = plan.update(
      self.tx, grads, state.inner, master, extra_args
    )
    new_master = state.master
    if self.has_master:
      master = optax.apply_updates(master, changes)
      changes = jax.tree.map(jnp.subtract, master, parts)
      new_master = dataclasses.replace(new_master, value=master)
    y, new = extend.keep_update(
      ok,
      self._gather(plan, changes, sending),
      (new_master, inner, codec_state),
      (state.master, state.inner, state.codec_state),
    )
    return y, ShardedState(*_states.count_update(state, ok), *new)

  def _make_plan(
    self, params: PyTree, key: core.Key | None, model: ModelAxes
  ) -> _Plan:
    """Plans the cut and the codecs of every leaf, or raises."""
    workers = core.axis_size(self.workers)
    find_codecs = lambda name, **options: extend.find_leaf_codecs(
      name, getattr(self, name), params, key, **options
    )
    gradient = find_codecs("gradient_codec")
    for leaf in gradient:
      if leaf.codec.needs_mean:
        raise ValueError(
          "`gradient_codec` must have feedback of local form, got "
          f"{leaf.codec!r}: no worker knows the mean of other workers' parts."
        )
    local, weight = (
      find_codecs(f"{word}_codec", prefix=f"{word}/", stateless=True)
      for word in ("local", "weight")
    )

    def cut_leaf(path: str, x: Any, kept: list[int]) -> LeafCut:
      core.float_array(f"params/{path}", x)
      return _shard_layout.cut_leaf(x, workers, kept)

    paths, cuts = _shard_layout.cut_leaves(params, model, cut_leaf)
    return _Plan(self.workers, model, paths, cuts, gradient, local, weight)

  def _own_parts(self, plan: _Plan, params: PyTree) -> PyTree:
    """Returns this worker's part of the parameters, as `tx` sees them."""

    def own_part(cut: LeafCut, x: Array) -> Array:
      part = cut.own_part(x, self.workers)
      wide = jnp.promote_types(part.dtype, jnp.float32)
      return part.astype(wide) if self.has_master else part

    return _shard_layout.map_cuts(own_part, params, plan.cuts)

  def _split_master(self, plan: _Plan, parts: PyTree) -> core.Split:
    """Returns the master of this worker's parts, empty if none is kept."""
    if self.has_master:
      return plan.split(parts)
    return core.Split((), (), core.axis_names(self.workers))

  def _init_codecs(
    self, plan: _Plan, params: PyTree
  ) -> tuple[list[PyTree], list[PyTree]]:
    """Makes states of codecs: one a row of leaves that are cut; of others."""
    rows = core.axis_size(core.split_axes(self.axis_name)[0])
    leaves = zip(plan.cuts, plan.gradient, jax.tree.leaves(params), strict=True)
    cut = [
      extend.init_rows(
        leaf.codec, rows, jax.ShapeDtypeStruct(cut.shard_shape(), x.dtype)
      )
      for cut, leaf, x in plan.select_cut(leaves)
    ]
    whole = _shard_layout.select_whole(params, plan.cuts)
    if not jax.tree.leaves(whole):
      return cut, []
    return cut, collectives.all_reduce_init(
      whole, self.workers, self.gradient_codec
    )

  def _check_state(
    self, plan: _Plan, state: ShardedState, parts: PyTree
  ) -> None:
    """Raises unless the state was made for these parameters and workers."""
    master, like = state.master, self._split_master(plan, parts)
    if not isinstance(master, core.Split) or (
      (master.dimensions, master.shards) != (like.dimensions, like.shards)
    ):
      raise ValueError(
        "`state` must be made for these parameters, codecs, specs and number "
        f"of workers: expected dimensions {like.dimensions} to be cut, got "
        f"{master!r}: continue it by `checkpoint.resize`."
      )
    source = "`init` (`checkpoint.resize` continues that of other workers)"
    inner = jax.eval_shape(lambda: self.tx.init(parts))
    core.check_like("state/master", master.value, like.value, source)
    core.check_like("state/inner", state.inner.value, inner, source)

  def _reduce(
    self,
    plan: _Plan,
    x: PyTree,
    state: core.PerWorker,
    key: core.Key,
    sending: hosts.Sending,
  ) -> tuple[PyTree, core.PerWorker]:
    """Averages gradients over workers; each keeps its part of every mean."""
    # Leaves that are cut are reduce-scattered, within hosts first with
    # `HostAxes`. Whole leaves are all-reduced.
    fresh = jax.eval_shape(lambda: self._init_codecs(plan, x))
    states, whole_state = extend.check_state(fresh, core.unpack_worker(state))
    leaves = zip(plan.cuts, jax.tree.leaves(x), strict=True)
    rows = [cut.cut_rows(a) for cut, a in plan.select_cut(leaves)]
    if isinstance(self.axis_name, core.HostAxes):
      rows = extend.average_locally(
        rows, plan.select_cut(plan.local), self.axis_name, sending
      )
    parts, states = extend.scatter_means(
      rows,
      plan.select_cut(plan.gradient),
      states,
      core.split_axes(self.axis_name)[0],
      sending,
    )
    whole = _shard_layout.select_whole(x, plan.cuts)
    if jax.tree.leaves(whole):
      whole, whole_state = collectives.all_reduce(
        whole,
        self.workers,
        self.gradient_codec,
        state=whole_state,
        key=key,
        sending=sending,
      )
    own = core.to_varying((states, whole_state), self.workers)
    return plan.join_leaves(parts, whole, x), core.pack_worker(own)

  def _gather(
    self, plan: _Plan, changes: PyTree, sending: hosts.Sending
  ) -> PyTree:
    """Gathers the changes of all workers' parts to those of whole leaves."""
    rows = extend.gather_shards(
      plan.select_cut(jax.tree.leaves(changes)),
      plan.select_cut(plan.weight),
      self.axis_name,
      sending,
    )
    joined = map(LeafCut.join_rows, plan.select_cut(plan.cuts), rows)
    whole = _shard_layout.select_whole(changes, plan.cuts)
    return plan.join_leaves(joined, whole, changes)


def _check_known(plan: _Plan, tree: PyTree) -> None:
  """Raises if devices of a model differ along axes that no spec names."""
  for path, spec, x in zip(
    plan.paths, plan.model.leaf_specs, jax.tree.leaves(tree), strict=True
  ):
    known = _model_axes.sharded_axes(spec).union(core.axis_names(plan.axes))
    if others := core.varying_axes(x) - known:
      raise ValueError(
        "`specs` must say how parameters are sharded over axes of the map, "
        f"{sorted(others)}, got {spec} for `{path}`: give `make_train_step` or "
        "`bind_mesh` a tree of PartitionSpecs, and sum gradients that a model "
        "computes in parts."
      )


class PartsLayout(NamedTuple):
  """Layout of the error memory of `sharded`, by which `resize` reads it."""

  hosts: int  # Number of workers, or of hosts if their devices reduce first.
  devices: int  # Number of devices of a host that reduce first, or 1.
  # The division of each leaf, its codec and the shape of a part.
  leaves: list[tuple[LeafCut, codecs.Codec, jax.ShapeDtypeStruct]]
  whole: PyTree  # Shapes of the leaves that all workers reduce whole.
  whole_layout: extend.StateLayout  # How they keep the states of these.


def parts_layout(
  options: _states.ShardedOptions, sizes: Mapping[str, int]
) -> PartsLayout:
  """Returns how the devices of a mesh keep the error memory of `sharded`."""
  # sizes: length of every axis of the mesh.
  params, codec = options.shard_params(sizes), options.gradient_codec
  hosts, devices = (
    core.count_devices(axes, sizes)
    for axes in core.split_axes(options.axis_name)
  )
  cuts = [
    _shard_layout.cut_leaf(
      x, hosts * devices, [i for i, names in enumerate(leaf.spec) if names]
    )
    for x, leaf in zip(jax.tree.leaves(params), options.leaves, strict=True)
  ]
  leaf_codecs = extend.find_leaf_codecs("gradient_codec", codec, params)
  leaves = [
    (cut, own.codec, jax.ShapeDtypeStruct(cut.shard_shape(), leaf.like.dtype))
    for cut, own, leaf in zip(cuts, leaf_codecs, options.leaves, strict=True)
  ]
  return PartsLayout(
    hosts,
    devices,
    leaves,
    _shard_layout.select_whole(params, cuts),
    extend.StateLayout(codec, hosts * devices),
  )
