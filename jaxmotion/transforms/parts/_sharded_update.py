"""State and update of an optimizer that is sharded over workers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxmotion import collectives, core, hosts
from jaxmotion.codecs import Codec
from jaxmotion.collectives.extend import (
  LeafCodec,
  apply_nonfinite_policy,
  apply_weight,
  average_locally,
  check_state,
  find_leaf_codecs,
  gather_shards,
  init_rows,
  keep_update,
  scatter_means,
)
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _exchange, _model_axes, _states
from jaxmotion.transforms.parts import _parts, _shard_layout


class _Leaf(NamedTuple):
  """One leaf of the parameters: its shape, division and codecs."""

  path: str
  spec: PartitionSpec
  like: Array
  cut: _shard_layout.LeafCut
  gradient: LeafCodec
  local: LeafCodec
  weight: LeafCodec


class _Division(NamedTuple):
  """Leaves of the parameters, and the axes that a model shards them over."""

  leaves: list[_Leaf]
  model: _model_axes.ModelAxes

  @property
  def cuts(self) -> list[_shard_layout.LeafCut]:
    """The division of every leaf between workers."""
    return [leaf.cut for leaf in self.leaves]

  @property
  def cut_leaves(self) -> dict[int, _Leaf]:
    """The leaves of which each worker has a part, by their positions."""
    return {i: leaf for i, leaf in enumerate(self.leaves) if leaf.cut.is_cut}

  def assert_shared(self, values: list[Array]) -> list[Array]:
    """Types arrays of leaves as equal along axes that do not shard them."""
    # All leaves travel in one buffer, which varies over axes that shard any.
    return [
      self.model.assert_shared(x, leaf.spec)
      for x, leaf in zip(values, self.leaves, strict=True)
    ]


class ShardedUpdate(NamedTuple):
  """Arguments of one `sharded`, and what one device does.

  Attributes:
    axis_name: the workers' axes, or `HostAxes`.
    workers: the axes of all workers.
    tx: transformation that updates each worker's part.
    weight_codec: codec of the differences, or None.
  """

  axis_name: AxisName
  workers: AxisName
  tx: optax.GradientTransformationExtraArgs
  gradient_codec: Codec
  weight_codec: Codec | None
  local_codec: Codec | None
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
    division = self._divide_leaves(params, None, model)
    parts = self._own_parts(division, params)
    # Copies: a step that donates parameters and state may not donate one twice.
    copies = jax.tree.map(jnp.copy, parts) if self.has_master else ()
    codec_states = self._codec_states(division, params)
    return _states.ShardedState(
      *_exchange.make_counts(),
      _parts.mark_parts(copies, *self._describe_master(division), self.workers),
      _parts.init_parts(self.tx, parts, division.cuts, self.workers, model),
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
    division = self._divide_leaves(params, key, model)
    for leaf, grad in zip(division.leaves, jax.tree.leaves(x), strict=True):
      for a in (leaf.like, grad):
        _check_known(leaf.path, a, leaf.spec, core.axis_names(self.workers))
    treedef: Any = jax.tree.structure(params)
    parts = self._own_parts(division, params)
    described = self._describe_master(division)
    self._check_state(state, described, parts)
    means, codec_state = self._reduce(
      x, division, state.codec_state, key, sending
    )
    grads = [
      mean.astype(part.dtype)
      for mean, part in zip(
        division.assert_shared(means), jax.tree.leaves(parts), strict=True
      )
    ]
    master = state.master.value if self.has_master else parts
    changes, inner = _parts.update_parts(
      self.tx,
      treedef.unflatten(grads),
      state.inner,
      master,
      division.cuts,
      self.workers,
      extra_args,
      model,
    )
    if self.has_master:
      master = optax.apply_updates(master, changes)
      changes = jax.tree.map(jnp.subtract, master, parts)
    new_master = _parts.mark_parts(
      master if self.has_master else (), *described, self.workers
    )
    whole = self._gather(division, treedef.flatten_up_to(changes), sending)
    y, new = keep_update(
      ok,
      treedef.unflatten(division.assert_shared(whole)),
      (new_master, inner, codec_state),
      (state.master, state.inner, state.codec_state),
    )
    return y, _states.ShardedState(*_exchange.count_update(state, ok), *new)

  def _divide_leaves(
    self, params: PyTree, key: core.Key | None, model: _model_axes.ModelAxes
  ) -> _Division:
    """Returns the division and the codecs of every leaf, or raises."""
    workers = core.axis_size(self.workers)
    gradient = find_leaf_codecs(
      "gradient_codec", self.gradient_codec, params, key
    )
    for leaf in gradient:
      if leaf.codec.needs_mean:
        raise ValueError(
          "`gradient_codec` must have feedback of local form, got "
          f"{leaf.codec!r}: no worker knows the mean of other workers' parts."
        )
    local, weight = (
      find_leaf_codecs(
        f"{prefix}_codec",
        codec,
        params,
        key,
        prefix=f"{prefix}/",
        stateless=True,
      )
      for prefix, codec in (
        ("local", self.local_codec),
        ("weight", self.weight_codec),
      )
    )
    leaves = []
    specs = model.leaf_specs(len(gradient))
    for (path, x), spec, *codecs in zip(
      core.named_leaves(params), specs, gradient, local, weight, strict=True
    ):
      core.check_float(f"params/{path}", x)
      # A dimension that both cut would have its rows in another order.
      sharded = [i for i, entry in enumerate(spec) if entry is not None]
      cut = _shard_layout.cut_leaf(x, workers, sharded)
      leaves.append(_Leaf(path, spec, x, cut, *codecs))
    return _Division(leaves, model)

  def _describe_master(
    self, division: _Division
  ) -> tuple[tuple[int | None, ...], tuple[PartitionSpec, ...]]:
    """Returns which dimension of each leaf is cut, and its spec."""
    if not self.has_master:
      return (), ()
    specs = [leaf.spec for leaf in division.leaves if division.model.names]
    return tuple(cut.dimension for cut in division.cuts), tuple(specs)

  def _own_parts(self, division: _Division, params: PyTree) -> PyTree:
    """Returns this worker's part of the parameters, as `tx` sees them."""

    def own_part(cut: _shard_layout.LeafCut, x: Array) -> Array:
      part = cut.own_part(x, self.workers)
      wide = jnp.promote_types(part.dtype, jnp.float32)
      return part.astype(wide) if self.has_master else part

    return _shard_layout.map_cuts(own_part, params, division.cuts)

  def _codec_states(
    self, division: _Division, params: PyTree
  ) -> tuple[list[PyTree], list[PyTree]]:
    """Returns fresh states of cut leaves, one a row, and of whole leaves."""
    rows = core.axis_size(core.split_axes(self.axis_name)[0])
    cut = [
      init_rows(
        leaf.gradient.codec,
        rows,
        jax.ShapeDtypeStruct(leaf.cut.shard_shape(), leaf.like.dtype),
      )
      for leaf in division.cut_leaves.values()
    ]
    whole = _shard_layout.select_whole(params, division.cuts)
    if not jax.tree.leaves(whole):
      return cut, []
    return cut, collectives.all_reduce_init(
      whole, self.workers, self.gradient_codec
    )

  def _check_state(
    self, state: _states.ShardedState, expected: tuple[Any, Any], parts: PyTree
  ) -> None:
    """Raises unless the state was made for these parameters and workers."""
    # expected: what `_describe_master` returns.
    master = state.master
    if (
      not isinstance(master, core.Split)
      or (master.dimensions, master.shards) != expected
    ):
      raise ValueError(
        "`state` must be made for these parameters, codecs, specs and number "
        f"of workers: expected dimensions {expected[0]} to be cut, got "
        f"{master!r}: continue it by `checkpoint.resize`."
      )
    like = parts if self.has_master else ()
    core.check_like("state/master", master.value, like, "`init`")
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
    x: PyTree,
    division: _Division,
    state: core.PerWorker,
    key: core.Key,
    sending: hosts.Sending,
  ) -> tuple[list[Array], core.PerWorker]:
    """Returns this worker's part of every mean gradient, and the new state."""
    expected = jax.eval_shape(lambda: self._codec_states(division, x))
    states, whole_state = check_state(expected, core.unpack_worker(state))
    values, cut = jax.tree.leaves(x), division.cut_leaves
    rows = [leaf.cut.cut_rows(values[i]) for i, leaf in cut.items()]
    if isinstance(self.axis_name, core.HostAxes):
      rows = average_locally(
        rows, [leaf.local for leaf in cut.values()], self.axis_name, sending
      )
    parts, states = scatter_means(
      rows,
      [leaf.gradient for leaf in cut.values()],
      states,
      core.split_axes(self.axis_name)[0],
      sending,
    )
    means: dict[int, Array] = dict(zip(cut, parts, strict=True))
    if len(cut) < len(values):
      y, whole_state = collectives.all_reduce(
        _shard_layout.select_whole(x, division.cuts),
        self.workers,
        self.gradient_codec,
        state=whole_state,
        key=key,
        sending=sending,
      )
      others = [i for i in range(len(values)) if i not in cut]
      means.update(zip(others, jax.tree.leaves(y), strict=True))
    state = core.pack_worker(
      core.to_varying((states, whole_state), self.workers)
    )
    return [means[i] for i in range(len(values))], state

  def _gather(
    self, division: _Division, changes: list[Array], sending: hosts.Sending
  ) -> list[Array]:
    """Returns the changes of whole parameters from those of all parts."""
    cut = division.cut_leaves
    rows = gather_shards(
      [changes[i] for i in cut],
      [leaf.weight for leaf in cut.values()],
      self.axis_name,
      sending,
    )
    whole = list(changes)
    for (i, leaf), gathered in zip(cut.items(), rows, strict=True):
      whole[i] = leaf.cut.join_rows(gathered)
    return whole


def _check_known(
  path: str, x: Array, spec: PartitionSpec, workers: tuple[Any, ...]
) -> None:
  """Raises if a leaf varies over axes that its spec does not name."""
  known = _model_axes.sharded_axes(spec).union(workers)
  if others := core.varying_axes(x) - known:
    raise ValueError(
      "`specs` must say how parameters are sharded over axes of the map, "
      f"{sorted(others)}, got {spec} for `{path}`: give `make_train_step` or "
      "`init_state` a tree of PartitionSpecs, and sum gradients that a model "
      "computes in parts."
    )
