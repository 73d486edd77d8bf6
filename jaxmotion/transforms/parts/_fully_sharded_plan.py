"""Division of parameters that a fully sharded step gives its loss function."""

import dataclasses
import math
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import fold_paths
from jaxmotion.collectives.extend import check_local_codec, find_leaf_codecs
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _exchange, _model_axes, _options, _states
from jaxmotion.transforms.parts import (
  _gradient_guard,
  _shard_layout,
  _weight_part,
)
from jaxmotion.transforms.step import _scheme


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class FullyShardedOptions:
  """Choices of one `fully_sharded` that its state depends on.

  Attributes:
    axis_name: the axes of all workers.
    error_feedback: whether they remember what they sent of gradients.
    hosts: number of workers, or of hosts, that remember it; 0 without memory.
    cuts: division of each leaf of the parameters, in the order of their tree.
  """

  axis_name: tuple[Any, ...]
  workers: int
  error_feedback: bool
  hosts: int
  cuts: tuple[_shard_layout.LeafCut, ...]


class GatherPlan(NamedTuple):
  """Arguments of `fully_sharded`, checked."""

  weight_codec: Codec | None
  gradient_codec: Codec | None
  local_codec: Codec | None
  error_feedback: bool
  regather: bool | str
  nonfinite: str
  stacked: Any
  seed: int

  @property
  def codecs(self) -> dict[str, Codec | None]:
    """The codecs of what is sent, by the names of their arguments."""
    names = "weight_codec", "gradient_codec", "local_codec"
    return {name: getattr(self, name) for name in names}

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


class PlannedLeaf(NamedTuple):
  """One leaf of the parameters: its place, spec and division."""

  path: str
  spec: P
  cut: _shard_layout.LeafCut
  is_stacked: bool

  def per_layer(self, x: Array) -> Array:
    """Returns a scalar for each layer of a stacked leaf that is cut."""
    if not self.cut.is_cut or not self.is_stacked:
      return x
    return jnp.broadcast_to(x, self.cut.shape[:1])


class ShardPlan(NamedTuple):
  """Division of certain parameters between the workers of a step.

  Attributes:
    options: arguments of `fully_sharded`.
    axes: the axes of all workers.
    axis_name: the same axes, as the step was given them.
    workers: number of workers of all axes.
    senders: number of those that encode for one another.
    model: axes of the model, and the spec of every leaf over them.
    leaves: every leaf of the parameters, which are whole.
  """

  options: GatherPlan
  axes: AxisName
  axis_name: AxisName
  workers: int
  senders: int
  model: _model_axes.ModelAxes
  leaves: tuple[PlannedLeaf, ...]

  @property
  def cuts(self) -> tuple[_shard_layout.LeafCut, ...]:
    """The division of every leaf between workers."""
    return tuple(leaf.cut for leaf in self.leaves)

  def param_specs(self, params: PyTree, axes: AxisName | None = None) -> PyTree:
    """Returns the partition spec of every leaf, of these axes or of all."""
    split = core.Split(
      params,
      tuple(cut.dimension for cut in self.cuts),
      core.axis_names(self.axes),
      tuple(leaf.spec for leaf in self.leaves),
    )
    return split.specs(None if axes is None else core.axis_names(axes)).value

  def memory_specs(self) -> list[P]:
    """Returns the partition spec of the error memory of every leaf."""
    return [P(self.axes, *leaf.spec) for leaf in self._remembered()]

  def make_memory(self, *workers: int) -> list[Array]:
    """Returns the empty error memory of one worker, or of so many."""
    return [
      jnp.zeros((*workers, *leaf.cut.shard_shape(self.senders)), jnp.float32)
      for leaf in self._remembered()
    ]

  def _remembered(self) -> list[PlannedLeaf]:
    """Returns the leaves that have error memory."""
    if not self.options.error_feedback:
      return []
    return [leaf for leaf in self.leaves if leaf.cut.is_cut]

  def make_state(
    self, inner: core.Split, error: core.PerWorker
  ) -> _states.FullyShardedState:
    """Makes the first state, of an optimizer's state and error memory."""
    core.know_in_flax(FullyShardedOptions)
    counts = _exchange.make_counts()
    return _states.FullyShardedState(*counts, inner, error, self.describe())

  def state_specs(self, inner: core.Split) -> _states.FullyShardedState:
    """Returns the partition specs of a state with this optimizer's state."""
    count: Any = P()
    error = core.PerWorker(self.memory_specs())
    return _states.FullyShardedState(
      count, count, inner.specs(), error, self.describe()
    )

  def describe(self) -> FullyShardedOptions:
    """Returns what a state of this configuration was made for."""
    return FullyShardedOptions(
      core.axis_names(self.axes),
      self.workers,
      self.options.error_feedback,
      self.senders if self.options.error_feedback else 0,
      self.cuts,
    )

  def leaf_keys(self, count: Array) -> list[core.Key | None]:
    """Returns the key of every leaf; one for each layer of a stacked leaf."""
    codecs = self.options.codecs.values()
    if not any(codec is not None and codec.needs_key for codec in codecs):
      return [None] * len(self.leaves)
    index = core.worker_index(self.axes)
    base = core.make_key(self.options.seed, index).fold(count)
    of_paths = fold_paths(base, [leaf.path for leaf in self.leaves])
    return [
      jax.vmap(key.fold)(jnp.arange(leaf.cut.shape[0]))
      if leaf.is_stacked
      else key
      for leaf, key in zip(self.leaves, of_paths, strict=True)
    ]

  def make_flags(self) -> list[Array]:
    """Returns a flag of every leaf, whose gradient says what is not finite."""
    # The list is empty unless updates may be skipped.
    if self.options.nonfinite != "skip":
      return []
    return [leaf.per_layer(jnp.zeros(())) for leaf in self.leaves]

  def wrap_parts(
    self,
    parts: PyTree,
    errors: list[Array],
    flags: list[Array],
    share: Array | None,
    keys: list[core.Key | None],
  ) -> PyTree:
    """Returns the tree that the loss function gets."""
    treedef: Any = jax.tree.structure(parts)
    options = self.options
    codecs = [
      find_leaf_codecs(name, codec, parts, stateless=True)
      for name, codec in options.codecs.items()
    ]
    memories, guards = iter(errors), iter(flags)
    nodes: list[PyTree] = []
    for x, key, leaf, weight, gradient, local in zip(
      jax.tree.leaves(parts), keys, self.leaves, *codecs, strict=True
    ):
      cut, spec = leaf.cut, leaf.spec
      own = None if share is None else leaf.per_layer(share)
      guard = _gradient_guard.GradientGuard(own, next(guards, None))
      if cut.dimension is None:
        nodes.append(
          _gradient_guard.guard_gradient(x, guard, options.nonfinite)
        )
        continue
      gather = _weight_part.GatherOptions(
        self.axis_name,
        cut.dimension - len(cut.shape),
        weight.codec,
        gradient.codec,
        None if options.local_codec is None else local.codec,
        options.regather,
        options.nonfinite,
        # Of the whole leaf: the axes of the model are not manual here.
        P(*spec, *[None] * (len(cut.shape) - len(spec))),
        cut.shape[cut.dimension] if cut.is_padded else None,
      )
      nodes.append(
        _weight_part.WeightPart(x, next(memories, None), key, guard, gather)
      )
    return treedef.unflatten(nodes)


def make_plan(
  options: GatherPlan,
  workers: _scheme.Workers,
  params: PyTree,
  mesh: Mesh | AbstractMesh,
) -> ShardPlan:
  """Returns the division of whole parameters, or raises."""
  axes, axis_name = workers.axis_name, workers.host_axes or workers.axis_name
  check_local_codec(axis_name, options.local_codec)
  _weight_part.check_regather(options.regather, axis_name)
  names, sizes = core.axis_names(axes), dict(mesh.shape)
  count, senders = (
    math.prod(sizes[name] for name in core.axis_names(found))
    for found in (axes, core.split_axes(axis_name)[0])
  )
  model = _model_axes.ModelAxes((), None)
  if workers.specs is not None:
    others = {n: size for n, size in sizes.items() if n not in names}
    model = _model_axes.ModelAxes(
      tuple(name for name, size in others.items() if size > 1),
      _model_axes.expand_specs(workers.specs, params, others),
    )
  named = core.named_leaves(params)
  leaves = []
  for (path, x), spec in zip(named, model.leaf_specs(len(named)), strict=True):
    is_stacked = options.is_stacked(path)
    cut = _shard_layout.cut_longest(
      x,
      count,
      first=int(is_stacked),
      sharded=[i for i, entry in enumerate(spec) if entry is not None],
    )
    leaves.append(PlannedLeaf(path, spec, cut, is_stacked))
  return ShardPlan(
    options, axes, axis_name, count, senders, model, tuple(leaves)
  )


def find_plan(
  options: GatherPlan, workers: _scheme.Workers, params: PyTree, state: Any
) -> ShardPlan:
  """Returns the division of parts and their optimizer's state, or raises."""
  name = "state/opt_state"
  core.check_instance(
    name, state, _states.FullyShardedState, "what `init` returned"
  )
  count = jax.ShapeDtypeStruct((), jnp.int32)
  core.check_like(f"{name}/count", state.count, count, "`init`")
  made_for = state.made_for
  core.check_instance(
    f"{name}/made_for", made_for, FullyShardedOptions, "that of `init`"
  )
  check_padded(params, made_for.cuts)
  whole = _shard_layout.map_cuts(
    lambda cut, x: jax.ShapeDtypeStruct(cut.shape, x.dtype),
    params,
    made_for.cuts,
  )
  plan = make_plan(options, workers, whole, workers.mesh)
  _options.check_made_for(name, made_for, plan.describe(), "step")
  return plan


def check_padded(
  params: PyTree, cuts: tuple[_shard_layout.LeafCut, ...]
) -> None:
  """Raises unless parameters have the shapes of all workers' parts."""
  named = core.named_leaves(params)
  shapes = [cut.shard_shape(cut.workers) for cut in cuts]
  for (path, x), shape in zip(named, shapes, strict=False):
    if jnp.shape(x) != shape:
      place = "/".join(filter(None, ("state/params", path)))
      raise ValueError(
        f"`{place}` must have the shape {shape} of all workers' parts, as "
        f"`init` makes it of whole parameters, got {jnp.shape(x)}."
      )
  if len(named) != len(shapes):
    raise ValueError(
      f"`state/params` must have the {len(shapes)} leaves that `state` was made"
      f" for, got {len(named)}."
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
