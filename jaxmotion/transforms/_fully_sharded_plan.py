"""Division of parameters that a fully sharded step gives its loss function."""

import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.collectives.extend import all_axes, find_leaf_codecs
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import (
  _gradient_guard,
  _model_axes,
  _shard_layout,
  _weight_part,
)


class FullyShardedState(NamedTuple):
  """State of a `fully_sharded` step.

  Attributes:
    count: int32[], updates so far.
    skipped: int32[], updates that were skipped for a non-finite element.
    inner: state of the optimizer, of each worker's part.
    error: error memory of each leaf that is cut, each worker's own; None
      without memory.

  Example:
    >>> import optax
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch @ transforms.gather_params(params)) ** 2)
    >>> init, _ = transforms.fully_sharded(loss_fn, optax.adam(1e-3), mesh)
    >>> params, state = init(jnp.eye(4))
    >>> int(state.count), [a.shape for a in jax.tree.leaves(state.inner)]
    (0, [(), (4, 4), (4, 4)])
  """

  count: Array  # type: ignore[assignment]
  skipped: Array
  inner: core.Split
  error: core.PerWorker


class ShardPlan(NamedTuple):
  """Configuration of a `fully_sharded` step, and what follows from it."""

  axis_name: AxisName
  local_axis: AxisName | None
  mesh: Mesh | AbstractMesh
  weight_codec: Codec | None
  gradient_codec: Codec | None
  local_codec: Codec | None
  error_feedback: bool
  regather: bool | str
  nonfinite: str
  specs: PyTree
  stacked: Any
  seed: int

  @property
  def axes(self) -> AxisName:
    """The axes of all workers."""
    return all_axes(self.axis_name, self.local_axis, self.local_codec)

  def count_workers(self) -> int:
    """Returns the number of workers of all axes."""
    return self._count(self.axes)

  def count_senders(self) -> int:
    """Returns how many workers, or hosts, encode the gradient for another."""
    return self._count(self.axis_name)

  def _count(self, axes: AxisName) -> int:
    return math.prod(self.mesh.shape[name] for name in core.axis_names(axes))

  def is_stacked(self, path: str) -> bool:
    """Returns whether the first dimension of a leaf counts layers."""
    return self.stacked is not None and bool(self.stacked.search(path))

  def check_stacked(self, params: PyTree) -> None:
    """Raises unless `stacked` matches the path of a leaf, if it is given."""
    paths = [path for path, _ in core.named_leaves(params)]
    if self.stacked is not None and not any(map(self.is_stacked, paths)):
      raise ValueError(
        f"`stacked` must match the path of a leaf, got {self.stacked.pattern!r}"
        f" for {', '.join(map(repr, paths))}."
      )

  def find_model(self, params: PyTree) -> _model_axes.ModelAxes:
    """Returns the axes of the model, and the spec of every leaf over them."""
    if self.specs is None:
      return _model_axes.ModelAxes((), None)
    shape, workers = dict(self.mesh.shape), core.axis_names(self.axes)
    sizes = {n: shape[n] for n in shape if n not in workers}
    names = tuple(name for name, size in sizes.items() if size > 1)
    return _model_axes.ModelAxes(
      names, _model_axes.expand_specs(self.specs, params, sizes)
    )

  def cut_leaves(self, params: PyTree) -> list[_shard_layout.LeafCut]:
    """Returns the division of every leaf between workers."""
    model, named = self.find_model(params), core.named_leaves(params)
    return [
      _shard_layout.cut_evenly(
        x,
        self.count_workers(),
        first=int(self.is_stacked(path)),
        sharded=[i for i, entry in enumerate(spec) if entry is not None],
      )
      for (path, x), spec in zip(
        named, model.leaf_specs(len(named)), strict=True
      )
    ]

  def param_specs(
    self,
    params: PyTree,
    cuts: list[_shard_layout.LeafCut],
    axes: AxisName | None = None,
  ) -> PyTree:
    """Returns the partition spec of every leaf, of these axes or of all."""
    split = core.Split(
      params,
      tuple(cut.dimension for cut in cuts),
      core.axis_names(self.axes),
      tuple(self.find_model(params).leaf_specs(len(cuts))),
    )
    return split.specs(None if axes is None else core.axis_names(axes)).value

  def memory_specs(
    self, params: PyTree, cuts: list[_shard_layout.LeafCut]
  ) -> list[P]:
    """Returns the partition spec of the error memory of every leaf."""
    specs = self.find_model(params).leaf_specs(len(cuts))
    return [
      P(self.axes, *spec)
      for cut, spec in zip(cuts, specs, strict=True)
      if self.error_feedback and cut.dimension is not None
    ]

  def state_specs(
    self, inner: core.Split, params: PyTree, cuts: list[_shard_layout.LeafCut]
  ) -> Any:
    """Returns the partition specs of a state with this optimizer's state."""
    error = core.PerWorker(self.memory_specs(params, cuts))
    count: Any = P()
    return FullyShardedState(count, count, inner.specs(), error)

  def leaf_keys(
    self, parts: PyTree, cuts: list[_shard_layout.LeafCut], count: Array
  ) -> list[core.Key | None]:
    """Returns the key of every leaf; one for each layer of a stacked leaf."""
    found = (self.weight_codec, self.gradient_codec, self.local_codec)
    codecs = [codec for codec in found if codec is not None]
    named = core.named_leaves(parts)
    if not any(codec.needs_key for codec in codecs):
      return [None] * len(named)
    base = core.make_key(self.seed, core.worker_index(self.axes)).fold(count)
    keys: list[core.Key | None] = []
    of_paths = core.fold_paths(base, [path for path, _ in named])
    for (path, _), cut, key in zip(named, cuts, of_paths, strict=True):
      if self.is_stacked(path):
        key = jax.vmap(key.fold)(jnp.arange(cut.shape[0]))
      keys.append(key)
    return keys

  def check_memory(self, error: Any, cuts: list[_shard_layout.LeafCut]) -> None:
    """Raises unless the error memory is that of this configuration."""
    like = jax.eval_shape(lambda: self.make_memory(cuts, self.count_workers()))
    core.check_instance("opt_state/error", error, core.PerWorker, "a PerWorker")
    core.check_like("opt_state/error", error.value, like, "`init`")

  def make_memory(
    self, cuts: list[_shard_layout.LeafCut], *workers: int
  ) -> list[Array]:
    """Returns the empty error memory of one worker, or of so many."""
    return [
      jnp.zeros((*workers, *cut.shard_shape(self.count_senders())), jnp.float32)
      for cut in cuts
      if self.error_feedback and cut.dimension is not None
    ]

  def make_flags(
    self, parts: PyTree, cuts: list[_shard_layout.LeafCut]
  ) -> list[Array]:
    """Returns a flag of every leaf, whose gradient says what is not finite."""
    # The list is empty unless updates may be skipped.
    if self.nonfinite != "skip":
      return []
    return [
      self._per_layer(jnp.zeros(()), path, cut)
      for (path, _), cut in zip(core.named_leaves(parts), cuts, strict=True)
    ]

  def _per_layer(
    self, x: Array, path: str, cut: _shard_layout.LeafCut
  ) -> Array:
    """Returns a scalar for each layer of a stacked leaf that is cut."""
    if cut.dimension is None or not self.is_stacked(path):
      return x
    return jnp.broadcast_to(x, cut.shape[:1])

  def wrap_parts(
    self,
    parts: PyTree,
    errors: list[Array],
    flags: list[Array],
    share: Array | None,
    keys: list[core.Key | None],
    cuts: list[_shard_layout.LeafCut],
    *,
    probe: bool = False,
  ) -> PyTree:
    """Returns the tree that the loss function gets."""
    leaves: Any = jax.tree.leaves(parts)
    treedef: Any = jax.tree.structure(parts)
    codecs = [
      find_leaf_codecs(name, codec, parts, stateless=True)
      for name, codec in (
        ("weight_codec", self.weight_codec),
        ("gradient_codec", self.gradient_codec),
        ("local_codec", self.local_codec),
      )
    ]
    # Of the whole tree: the axes of the model are not manual here.
    shards = self.find_model(_whole_like(parts, cuts)).leaf_specs(len(leaves))
    memories, guards = iter(errors), iter(flags)
    paths = [path for path, _ in core.named_leaves(parts)]
    nodes: list[PyTree] = []
    for path, x, key, cut, shard, weight, gradient, local in zip(
      paths, leaves, keys, cuts, shards, *codecs, strict=True
    ):
      own = None if share is None else self._per_layer(share, path, cut)
      guard = _gradient_guard.GradientGuard(own, next(guards, None))
      if cut.dimension is None:
        nodes.append(_gradient_guard.guard_gradient(x, guard, self.nonfinite))
        continue
      options = _weight_part.GatherOptions(
        self.axis_name,
        cut.dimension - len(cut.shape),
        weight.codec,
        gradient.codec,
        self.local_axis,
        None if self.local_axis is None else local.codec,
        self.regather,
        self.nonfinite,
        P(*shard, *[None] * (len(cut.shape) - len(shard))),
        probe,
      )
      nodes.append(
        _weight_part.WeightPart(x, next(memories, None), key, guard, options)
      )
    return treedef.unflatten(nodes)


def _whole_like(parts: PyTree, cuts: list[_shard_layout.LeafCut]) -> PyTree:
  """Returns the shapes of whole parameters."""
  leaves: Any = jax.tree.leaves(parts)
  treedef: Any = jax.tree.structure(parts)
  return treedef.unflatten(
    [
      jax.ShapeDtypeStruct(cut.shape, x.dtype)
      for x, cut in zip(leaves, cuts, strict=True)
    ]
  )


def compile_pattern(stacked: Any) -> Any:
  """Returns a compiled regular expression, or None; raises by its name."""
  if stacked is None:
    return None
  core.check_text("stacked", stacked)
  try:
    return re.compile(stacked)
  except re.error as error:
    raise ValueError(
      f"`stacked` must be a regular expression, got {stacked!r}: {error}."
    ) from error


def copy_to(tree: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
  """Returns copies of arrays on the mesh, without weak types."""
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

  def copy(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda a: jnp.copy(a.astype(a.dtype)), tree)

  return jax.jit(copy, out_shardings=shardings)(
    core.put_on_mesh(tree, mesh, specs)
  )
