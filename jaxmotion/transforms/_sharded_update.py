"""Steps of the update of an optimizer whose state is sharded over workers."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxmotion import collectives, core
from jaxmotion.codecs import Codec, feedback
from jaxmotion.collectives.extend import (
  LeafCodec,
  average_locally,
  check_state,
  find_leaf_codecs,
  gather_shards,
  init_rows,
  scatter_means,
)
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _model_axes, _parts, _shard_layout


class ShardedState(NamedTuple):
  """State of the `sharded` transformation.

  Attributes:
    count: int32[], updates so far.
    skipped: int32[], updates that were skipped for a non-finite element.
    master: parameters in float32, each worker's part; empty without a
      `weight_codec`.
    inner: state of the wrapped transformation, of each worker's part.
    codec_state: state of the gradients' codec, each worker's own.

  Example:
    >>> import optax
    >>> from jaxmotion import codecs, transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> tx = transforms.sharded(
    ...   "data", optax.adam(1e-3), weight_codec=codecs.uniform(bits=4)
    ... )
    >>> state = transforms.init_state(tx, jnp.zeros((8, 4), "bfloat16"), mesh)
    >>> state.master.value.dtype, state.count.tolist()
    (dtype('float32'), 0)
  """

  count: Array  # type: ignore[assignment]
  skipped: Array
  master: core.Split
  inner: core.Split
  codec_state: core.PerWorker


class _Leaf(NamedTuple):
  """One leaf of the parameters: its shape, division and codecs."""

  path: str
  spec: PartitionSpec
  like: Array
  cut: _shard_layout.LeafCut
  gradient: LeafCodec
  local: LeafCodec
  weight: LeafCodec


class ShardedUpdate(NamedTuple):
  """Configuration of `sharded`, and the steps of its update.

  Attributes:
    axis_name: the workers' axis, or that of the hosts.
    workers: the axes of all workers.
    tx: transformation that updates each worker's part.
    gradient_codec: codec of the gradients' parts.
    weight_codec: codec of the differences, or None.
    local_axis: the axis of the devices of one host, or None.
    local_codec: codec of gradients within a host, or None.
  """

  axis_name: AxisName
  workers: AxisName
  tx: optax.GradientTransformationExtraArgs
  gradient_codec: Codec
  weight_codec: Codec | None
  local_axis: AxisName | None
  local_codec: Codec | None

  @property
  def has_master(self) -> bool:
    """Whether there is a copy of the parameters that is more precise."""
    return self.weight_codec is not None

  def init(
    self, params: PyTree, model: _model_axes.ModelAxes
  ) -> tuple[core.Split, core.Split, core.PerWorker]:
    """Returns the master, the inner state and the codec's state."""
    leaves, treedef = self._find_leaves(params, None, model)
    cuts = [leaf.cut for leaf in leaves]
    parts = treedef.unflatten(self._own_parts(leaves, treedef, params))
    rows, whole = self._codec_states(leaves, params)
    # Copies: a step that donates parameters and state may not donate one twice.
    copies = jax.tree.map(jnp.copy, parts) if self.has_master else ()
    return (
      self._mark_master(copies, leaves, model),
      _parts.init_parts(self.tx, parts, cuts, self.workers, model),
      core.pack_worker(core.to_varying((rows, whole), self.workers)),
    )

  def update(
    self,
    x: PyTree,
    state: tuple[core.Split, core.Split, core.PerWorker],
    params: PyTree,
    key: core.Key,
    extra_args: dict[str, Any],
    model: _model_axes.ModelAxes,
  ) -> tuple[PyTree, tuple[core.Split, core.Split, core.PerWorker]]:
    """Returns the updates of whole parameters and the new state."""
    leaves, treedef = self._find_leaves(params, key, model)
    for leaf, grad in zip(leaves, treedef.flatten_up_to(x), strict=True):
      _check_known(leaf.path, grad, leaf.spec, core.axis_names(self.workers))
    old_master, old_inner, codec_state = state
    parts = self._own_parts(leaves, treedef, params)
    self._check_master(old_master, leaves, treedef, parts, model)
    self._check_inner(old_inner, treedef.unflatten(parts))
    means, codec_state = self._reduce(x, leaves, treedef, codec_state, key)
    means = _assert_shared(means, leaves, model)
    master = old_master.value if self.has_master else treedef.unflatten(parts)
    grads = [
      mean.astype(part.dtype) for mean, part in zip(means, parts, strict=True)
    ]
    own = [leaf.cut.dimension is not None for leaf in leaves]
    changes, inner = _parts.update_parts(
      self.tx,
      treedef.unflatten(grads),
      old_inner,
      master,
      own,
      self.workers,
      extra_args,
      model,
    )
    if self.has_master:
      master = optax.apply_updates(master, changes)
      changes = jax.tree.map(jnp.subtract, master, treedef.unflatten(parts))
    new_master = self._mark_master(
      master if self.has_master else (), leaves, model
    )
    whole = self._gather(leaves, treedef.flatten_up_to(changes))
    y = treedef.unflatten(_assert_shared(whole, leaves, model))
    return y, (new_master, inner, codec_state)

  def _find_leaves(
    self, params: PyTree, key: core.Key | None, model: _model_axes.ModelAxes
  ) -> tuple[list[_Leaf], Any]:
    """Returns the leaves of the parameters and the structure of the tree."""
    workers = core.axis_size(self.workers)
    treedef: Any = jax.tree.structure(params)
    gradient = find_leaf_codecs(
      "gradient_codec", self.gradient_codec, params, key
    )
    for leaf in gradient:
      if isinstance(leaf.codec, feedback) and leaf.codec.form == "global":
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
      _check_known(path, x, spec, core.axis_names(self.workers))
      # A dimension that both cut would have its rows in another order.
      sharded = [i for i, entry in enumerate(spec) if entry is not None]
      leaves.append(
        _Leaf(
          path, spec, x, _shard_layout.cut_leaf(x, workers, sharded), *codecs
        )
      )
    return leaves, treedef

  def _mark_master(
    self, master: PyTree, leaves: list[_Leaf], model: _model_axes.ModelAxes
  ) -> core.Split:
    dimensions, shards = self._describe_master(leaves, model)
    return _parts.mark_parts(master, dimensions, self.workers, shards=shards)

  def _describe_master(
    self, leaves: list[_Leaf], model: _model_axes.ModelAxes
  ) -> tuple[tuple[int | None, ...], tuple[PartitionSpec, ...]]:
    """Returns which dimension of each leaf is cut, and its spec."""
    if not self.has_master:
      return (), ()
    specs = tuple(leaf.spec for leaf in leaves) if model.names else ()
    return tuple(leaf.cut.dimension for leaf in leaves), specs

  def _own_parts(
    self, leaves: list[_Leaf], treedef: Any, params: PyTree
  ) -> list[Array]:
    """Returns this worker's part of the parameters, as `tx` sees them."""

    def own_part(leaf: _Leaf, x: Array) -> Array:
      part = leaf.cut.own_part(x, self.workers)
      wide = jnp.promote_types(part.dtype, jnp.float32)
      return part.astype(wide) if self.has_master else part

    values = treedef.flatten_up_to(params)
    return [own_part(leaf, x) for leaf, x in zip(leaves, values, strict=True)]

  def _codec_states(
    self, leaves: list[_Leaf], params: PyTree
  ) -> tuple[list[PyTree], list[PyTree]]:
    """Returns fresh states of cut leaves, one a row, and of whole leaves."""
    rows = core.axis_size(self.axis_name)
    cut = [
      init_rows(
        leaf.gradient.codec,
        rows,
        jax.ShapeDtypeStruct(leaf.cut.shard_shape(), leaf.like.dtype),
      )
      for leaf in leaves
      if leaf.cut.dimension is not None
    ]
    return cut, self._init_whole(leaves, params)

  def _init_whole(self, leaves: list[_Leaf], params: PyTree) -> list[PyTree]:
    whole = _shard_layout.select_whole(params, [leaf.cut for leaf in leaves])
    if not jax.tree.leaves(whole):
      return []
    return collectives.all_reduce_init(whole, self.workers, self.gradient_codec)

  def _check_master(
    self,
    master: core.Split,
    leaves: list[_Leaf],
    treedef: Any,
    parts: list[Array],
    model: _model_axes.ModelAxes,
  ) -> None:
    """Raises unless the state was made for these parameters and workers."""
    expected = self._describe_master(leaves, model)
    if (
      not isinstance(master, core.Split)
      or (master.dimensions, master.shards) != expected
    ):
      raise ValueError(
        "`state` must be made for these parameters, codecs, specs and number "
        f"of workers: expected dimensions {expected[0]} to be cut, got "
        f"{master!r}: continue it by `checkpoint.resize`."
      )
    like = treedef.unflatten(parts) if self.has_master else ()
    core.check_like("state/master", master.value, like, "`init`")

  def _check_inner(self, inner: core.Split, parts: PyTree) -> None:
    """Raises unless moments are of the parts that this worker has."""
    like = jax.eval_shape(lambda: self.tx.init(parts))
    expected, found = (
      [jnp.shape(x) for x in jax.tree.leaves(tree)]
      for tree in (like, inner.value)
    )
    if found != expected:
      raise ValueError(
        "`state/inner` must be made for these parameters and number of workers,"
        f" with arrays of shapes {expected}, got {found}: continue it by "
        "`checkpoint.resize`."
      )

  def _reduce(
    self,
    x: PyTree,
    leaves: list[_Leaf],
    treedef: Any,
    state: core.PerWorker,
    key: core.Key,
  ) -> tuple[list[Array], core.PerWorker]:
    """Returns this worker's part of every mean gradient, and the new state."""
    expected = jax.eval_shape(lambda: self._codec_states(leaves, x))
    states, whole_state = check_state(expected, core.unpack_worker(state))
    values = treedef.flatten_up_to(x)
    cut = [i for i, leaf in enumerate(leaves) if leaf.cut.dimension is not None]
    rows = [leaves[i].cut.cut_rows(values[i]) for i in cut]
    if self.local_axis is not None:
      rows = average_locally(
        rows, [leaves[i].local for i in cut], self.axis_name, self.local_axis
      )
    parts, states = scatter_means(
      rows, [leaves[i].gradient for i in cut], states, self.axis_name
    )
    means: dict[int, Array] = dict(zip(cut, parts, strict=True))
    whole = _shard_layout.select_whole(x, [leaf.cut for leaf in leaves])
    if len(cut) < len(leaves):
      y, whole_state = collectives.all_reduce(
        whole,
        self.workers,
        self.gradient_codec,
        state=whole_state,
        key=key,
      )
      whole_leaves = iter(jax.tree.leaves(y))
      means |= {
        i: next(whole_leaves) for i in range(len(leaves)) if i not in means
      }
    state = core.pack_worker(
      core.to_varying((states, whole_state), self.workers)
    )
    return [means[i] for i in range(len(leaves))], state

  def _gather(self, leaves: list[_Leaf], changes: list[Array]) -> list[Array]:
    """Returns the changes of whole parameters from those of all parts."""
    cut = [i for i, leaf in enumerate(leaves) if leaf.cut.dimension is not None]
    rows = gather_shards(
      [changes[i] for i in cut],
      [leaves[i].weight for i in cut],
      self.axis_name,
      self.local_axis,
    )
    whole = list(changes)
    for i, gathered in zip(cut, rows, strict=True):
      whole[i] = leaves[i].cut.join_rows(gathered)
    return whole


def _assert_shared(
  values: list[Array], leaves: list[_Leaf], model: _model_axes.ModelAxes
) -> list[Array]:
  """Types arrays of leaves as equal along axes that do not shard them."""
  # All leaves travel in one buffer, which varies over axes that shard any.
  return [
    model.assert_shared(x, leaf.spec)
    for x, leaf in zip(values, leaves, strict=True)
  ]


def _check_known(
  path: str, x: Array, spec: PartitionSpec, workers: tuple[Any, ...]
) -> None:
  """Raises if a leaf varies over axes that its spec does not name."""
  if (
    others := core.varying_axes(x)
    - set(workers)
    - _model_axes.sharded_axes(spec)
  ):
    raise ValueError(
      "`specs` must say how parameters are sharded over axes of the map, "
      f"{sorted(others)}, got {spec} for `{path}`: give `sharded` a tree of "
      "PartitionSpecs, and sum gradients that a model computes in parts."
    )
