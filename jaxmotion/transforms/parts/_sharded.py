"""Optimizer whose state is sharded over workers, as an optax transformation."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import codecs, collectives, core, hosts
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives.extend import (
  NONFINITE_POLICIES,
  LeafCodec,
  apply_nonfinite_policy,
  apply_weight,
  average_locally,
  check_state,
  check_weight,
  find_leaf_codecs,
  gather_shards,
  init_rows,
  keep_update,
  scatter_means,
)
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import (
  _exchange,
  _model_axes,
  _placement,
  _states,
)
from jaxmotion.transforms.parts import _shard_layout


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
      once. Give the same `HostAxes` to `make_train_step`, `init_state` and
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
    A transformation whose `init` and `update` run inside `shard_map`;
    `make_train_step` and `init_state` run them there. `update` needs the
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
  workers = core.flatten_axes("axis_name", axis_name)
  tx = _placement.as_transformation(tx)
  core.check_choice("nonfinite", nonfinite, NONFINITE_POLICIES)
  core.check_int("seed", seed, 0, 2**32 - 1)
  for name, codec in (
    ("gradient_codec", gradient_codec),
    ("weight_codec", weight_codec),
    ("local_codec", local_codec),
  ):
    if codec is not None:
      check_codec(name, codec, trees=True)
  one = _Sharded(
    axis_name,
    workers,
    optax.with_extra_args_support(tx),
    codecs.identity() if gradient_codec is None else gradient_codec,
    weight_codec,
    local_codec,
    nonfinite,
    seed,
  )
  # Every leaf is encoded by itself, so no codec joins some.
  init_mapped, update_mapped = _model_axes.map_model_axes(
    one.init, one.update, one.workers, ()
  )

  def make_state(params: PyTree, specs: PyTree | None) -> _states.ShardedState:
    state = init_mapped(params, specs)
    return _exchange.note_options(state, options, params, specs)

  def init_fn(params: PyTree) -> _states.ShardedState:
    core.check_arrays("params", params, numbers=False)
    return make_state(params, None)

  options = _exchange.ShardedOptions(
    axis_name=core.comparable_axes(axis_name),
    gradient_codec=one.gradient_codec,
    weight_codec=weight_codec,
    tx=tx,
    init=make_state,
  )

  def update_fn(
    updates: PyTree,
    state: _states.ShardedState,
    params: PyTree | None = None,
    *,
    weight: Any = None,
    sending: hosts.Sending | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, _states.ShardedState]:
    core.check_arrays("updates", updates, numbers=False)
    core.check_arrays("params", params, numbers=False)
    _exchange.check_options(state, _states.ShardedState, options)
    check_weight(weight)
    if params is None:
      raise ValueError(
        "`params` must be given to `update` of `sharded`, got None."
      )
    core.check_like("updates", updates, params, "`params`")
    sending = hosts.check_sending(sending)
    args = {**extra_args, "weight": weight, "sending": sending}
    made_for = state.made_for
    state = state._replace(made_for=None)
    updates, state = update_mapped(updates, state, params, args, made_for.specs)
    return updates, state._replace(made_for=made_for)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class _Plan(_shard_layout.CutTree):
  """Division of parameters, and the codecs of every leaf."""

  gradient: list[LeafCodec]
  local: list[LeafCodec]
  weight: list[LeafCodec]


class _Sharded(NamedTuple):
  """Arguments of one `sharded`, and what one device does."""

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

  def init(
    self, params: PyTree, model: _model_axes.ModelAxes
  ) -> _states.ShardedState:
    """Returns the state of one device's shards."""
    plan = self._make_plan(params, None, model)
    parts = self._own_parts(plan, params)
    # Copies: a step that donates parameters and state may not donate one twice.
    master = self._split_master(plan, jax.tree.map(jnp.copy, parts))
    codec_states = self._init_codecs(plan, params)
    return _states.ShardedState(
      *_exchange.make_counts(),
      plan.mark(master),
      plan.init(self.tx, parts),
      core.pack_worker(core.to_varying(codec_states, self.workers)),
    )

  def update(
    self,
    updates: PyTree,
    state: _states.ShardedState,
    params: PyTree,
    args: dict[str, Any],
    model: _model_axes.ModelAxes,
  ) -> tuple[PyTree, _states.ShardedState]:
    """Returns the updates of one device's shards, and their new state."""
    _exchange.check_local(updates, self.workers)
    extra_args = dict(args)
    sending = extra_args.pop("sending")
    # All shards of a model are skipped, or none.
    (x, weight), ok = apply_nonfinite_policy(
      self.nonfinite,
      (updates, extra_args.pop("weight")),
      (*core.axis_names(self.workers), *model.names),
    )
    index = core.worker_index(self.workers)
    key = core.make_key(self.seed, index).fold(state.count)
    x = apply_weight(
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
    y, new = keep_update(
      ok,
      self._gather(plan, changes, sending),
      (new_master, inner, codec_state),
      (state.master, state.inner, state.codec_state),
    )
    return y, _states.ShardedState(*_exchange.count_update(state, ok), *new)

  def _make_plan(
    self, params: PyTree, key: core.Key | None, model: _model_axes.ModelAxes
  ) -> _Plan:
    """Returns the division and the codecs of every leaf, or raises."""
    workers = core.axis_size(self.workers)

    def find_codecs(word: str, codec: Any, **options: Any) -> list[LeafCodec]:
      return find_leaf_codecs(f"{word}_codec", codec, params, key, **options)

    gradient = find_codecs("gradient", self.gradient_codec)
    for leaf in gradient:
      if leaf.codec.needs_mean:
        raise ValueError(
          "`gradient_codec` must have feedback of local form, got "
          f"{leaf.codec!r}: no worker knows the mean of other workers' parts."
        )
    own = {"stateless": True}
    local = find_codecs("local", self.local_codec, prefix="local/", **own)
    weight = find_codecs("weight", self.weight_codec, prefix="weight/", **own)

    def cut_leaf(path: str, x: Any, kept: list[int]) -> _shard_layout.LeafCut:
      core.check_float(f"params/{path}", x)
      return _shard_layout.cut_leaf(x, workers, kept)

    paths, cuts = _shard_layout.cut_leaves(params, model, cut_leaf)
    return _Plan(self.workers, model, paths, cuts, gradient, local, weight)

  def _own_parts(self, plan: _Plan, params: PyTree) -> PyTree:
    """Returns this worker's part of the parameters, as `tx` sees them."""

    def own_part(cut: _shard_layout.LeafCut, x: Array) -> Array:
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
    """Returns fresh states of cut leaves, one a row, and of whole leaves."""
    rows = core.axis_size(core.split_axes(self.axis_name)[0])
    leaves = zip(plan.cuts, plan.gradient, jax.tree.leaves(params), strict=True)
    cut = [
      init_rows(
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
    self, plan: _Plan, state: _states.ShardedState, parts: PyTree
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
    core.check_like("state/master", master.value, like.value, "`init`")
    inner = jax.eval_shape(lambda: self.tx.init(parts))
    shapes, found = (
      [jnp.shape(x) for x in jax.tree.leaves(tree)]
      for tree in (inner, state.inner.value)
    )
    if found != shapes:
      raise ValueError(
        "`state/inner` must be made for these parameters and number of workers,"
        f" with arrays of shapes {shapes}, got {found}: continue it by "
        "`checkpoint.resize`."
      )

  def _reduce(
    self,
    plan: _Plan,
    x: PyTree,
    state: core.PerWorker,
    key: core.Key,
    sending: hosts.Sending,
  ) -> tuple[PyTree, core.PerWorker]:
    """Returns this worker's part of every mean gradient, and the new state."""
    fresh = jax.eval_shape(lambda: self._init_codecs(plan, x))
    states, whole_state = check_state(fresh, core.unpack_worker(state))
    leaves = zip(plan.cuts, jax.tree.leaves(x), strict=True)
    rows = [cut.cut_rows(a) for cut, a in plan.select_cut(leaves)]
    if isinstance(self.axis_name, core.HostAxes):
      rows = average_locally(
        rows, plan.select_cut(plan.local), self.axis_name, sending
      )
    parts, states = scatter_means(
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
    """Returns the changes of whole parameters from those of all parts."""
    rows = gather_shards(
      plan.select_cut(jax.tree.leaves(changes)),
      plan.select_cut(plan.weight),
      self.axis_name,
      sending,
    )
    joined = [
      cut.join_rows(gathered)
      for cut, gathered in zip(plan.select_cut(plan.cuts), rows, strict=True)
    ]
    return plan.join_leaves(
      joined, _shard_layout.select_whole(changes, plan.cuts), changes
    )


def _check_known(plan: _Plan, tree: PyTree) -> None:
  """Raises if a leaf varies over axes that its spec does not name."""
  for path, spec, x in zip(
    plan.paths, plan.model.leaf_specs, jax.tree.leaves(tree), strict=True
  ):
    known = _model_axes.sharded_axes(spec).union(core.axis_names(plan.axes))
    if others := core.varying_axes(x) - known:
      raise ValueError(
        "`specs` must say how parameters are sharded over axes of the map, "
        f"{sorted(others)}, got {spec} for `{path}`: give `make_train_step` or "
        "`init_state` a tree of PartitionSpecs, and sum gradients that a model "
        "computes in parts."
      )
