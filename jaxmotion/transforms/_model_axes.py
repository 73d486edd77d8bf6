"""Exchange of shards: an inner map over the axes of a sharded model.

Parameters may be sharded over axes of the mesh that are not the workers'. XLA's
partitioner would gather their gradients before a codec sees them, or fail. So
an inner map makes these axes manual as well. Every device encodes its own
shard, sends only that, and remembers only the error of that.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import partition
from jaxmotion.core import AxisName, PyTree


def check_specs(specs: PyTree, workers: AxisName) -> None:
  """Raises unless a tree holds partition specs over axes of the model."""
  for path, spec in core.named_leaves(specs):
    at = f" at {path!r}" if path else ""
    if not isinstance(spec, PartitionSpec):
      raise TypeError(
        f"`specs` must be a tree of PartitionSpecs, got {spec!r:.200}{at}."
      )
    if shared := sharded_axes(spec) & set(core.axis_names(workers)):
      raise ValueError(
        "`specs` must name axes of the model, not those of the workers, who "
        f"all hold the same parameters, got {sorted(shared)}{at}."
      )


def sharded_axes(spec: PartitionSpec) -> set[Any]:
  """Returns the names of the axes that a spec shards over."""
  return {name for entry in spec for name in core.spec_axes(entry)}


def drop_single_axes(specs: PyTree, sizes: Mapping[Any, int]) -> PyTree:
  """Returns specs without axes of one device, which shard nothing."""
  # sizes: sizes of the mesh's axes by name; other axes are kept, to be refused.

  def drop(spec: PartitionSpec) -> PartitionSpec:
    kept = [
      tuple(name for name in core.spec_axes(entry) if sizes.get(name) != 1)
      for entry in spec
    ]
    return PartitionSpec(
      *(
        entry if names == core.spec_axes(entry) else names or None
        for names, entry in zip(kept, spec, strict=True)
      )
    )

  return jax.tree.map(drop, specs)


def expand_specs(specs: PyTree, tree: PyTree, sizes: dict[Any, int]) -> PyTree:
  """Returns a spec for every leaf of a tree; raises unless the specs fit."""
  # specs: a prefix of the tree. sizes: sizes of the mesh's axes by name.
  full = spread_specs(specs, tree)
  for (path, leaf), spec in zip(
    core.named_leaves(tree), jax.tree.leaves(full), strict=True
  ):
    shape = jnp.shape(leaf)
    at = f" at {path!r}" if path else ""
    if missing := sharded_axes(spec) - set(sizes):
      raise ValueError(
        f"`specs` must name axes of the mesh {tuple(sizes)}, got "
        f"{sorted(missing)}{at}."
      )
    parts = [
      math.prod(sizes[n] for n in core.spec_axes(entry)) for entry in spec
    ]
    if len(parts) > len(shape) or any(
      n % k for n, k in zip(shape, parts, strict=False)
    ):
      raise ValueError(
        "`specs` must shard dimensions that the axes divide, got "
        f"{spec}{at} of shape {shape}."
      )
  return full


def spread_specs(specs: PyTree, tree: PyTree) -> PyTree:
  """Returns the spec of every leaf of a tree, of which `specs` is a prefix."""
  try:
    return jax.tree.map(
      lambda spec, branch: jax.tree.map(lambda _: spec, branch), specs, tree
    )
  except (TypeError, ValueError) as error:
    raise ValueError(
      "`specs` must be a PartitionSpec or a tree of them like the parameters, "
      f"{jax.tree.structure(tree)}, got {jax.tree.structure(specs)}."
    ) from error


class ModelAxes(NamedTuple):
  """Axes of the model that a map made manual, as an exchange sees them.

  Attributes:
    names: names of the axes; () if a leaf is whole on every device.
    specs: partition spec of each leaf of the parameters over them.
  """

  names: tuple[Any, ...]
  specs: PyTree

  def leaf_specs(self, count: int) -> list[PartitionSpec]:
    """Returns the spec of each of so many leaves."""
    if not self.names:
      return [PartitionSpec()] * count
    return jax.tree.leaves(self.specs)

  def assert_shared(self, x: Any, spec: PartitionSpec) -> Any:
    """Types an array as equal along axes that do not shard it."""
    # All devices of a worker encode such an array alike.
    used = sharded_axes(spec)
    return core.assert_replicated(
      x, tuple(n for n in self.names if n not in used)
    )


def map_model_axes(
  init: Callable[..., PyTree],
  update: Callable[..., tuple[PyTree, PyTree]],
  workers: AxisName,
  codecs: Sequence[Codec],
) -> tuple[Callable[..., PyTree], Callable[..., tuple[PyTree, PyTree]]]:
  """Runs an exchange on the shards of a model, where its axes are not
  manual."""

  def find_axes(specs: PyTree | None) -> dict[Any, int]:
    sizes = _model_axes(workers)
    if not sizes:
      return {}
    # A map without types leaves other axes to the caller, who gives specs.
    told = (
      specs is not None or core.tracks_varying(workers) or _are_explicit(sizes)
    )
    return sizes if told else {}

  def map_options(names: Any, in_specs: Any) -> dict[str, Any]:
    return dict(
      in_specs=in_specs,
      axis_names=set(names),
      check_vma=core.tracks_varying(workers),
    )

  def init_shards(params: PyTree, specs: PyTree | None) -> PyTree:
    sizes = find_axes(specs)
    # Without specs a state is that of whole arrays, until `shard_states`.
    if not sizes or (specs is None and not _are_explicit(sizes)):
      return init(params, _manual_axes(specs, params, workers))
    model = ModelAxes(tuple(sizes), _choose_specs(specs, params, sizes))

    def init_own(params: PyTree) -> PyTree:
      return init(params, model)

    maps = map_options(model.names, (model.specs,))
    shapes = core.eval_shape_in_map(init_own, maps, params)
    out_specs = _shard_specs(shapes, model.names)
    return jax.shard_map(init_own, out_specs=out_specs, **maps)(params)

  def update_shards(
    updates: PyTree,
    state: PyTree,
    params: PyTree,
    args: dict[str, Any],
    specs: PyTree | None,
  ) -> tuple[PyTree, PyTree]:
    sizes = find_axes(specs)
    if not sizes:
      model = _manual_axes(specs, updates, workers)
      return update(updates, state, params, args, model)
    model = ModelAxes(tuple(sizes), _choose_specs(specs, updates, sizes))
    for codec in codecs:
      _check_joined(codec, updates, model.specs)
    args = args | {"sending": args["sending"].keep_scalars()}
    arrays, join_args = _split_arrays(args)

    def update_own(
      updates: PyTree, state: PyTree, params: PyTree, arrays: PyTree
    ) -> tuple[PyTree, PyTree]:
      mean, state = update(updates, state, params, join_args(arrays), model)
      return jax.tree.map(model.assert_shared, mean, model.specs), state

    state_specs = _shard_specs(state, model.names)
    in_specs = (
      model.specs,
      state_specs,
      PartitionSpec() if params is None else model.specs,
      [_args_spec(arg, updates, model.specs) for arg in arrays],
    )
    mapped = jax.shard_map(
      update_own,
      out_specs=(model.specs, state_specs),
      **map_options(model.names, in_specs),
    )
    return mapped(updates, state, params, arrays)

  return init_shards, update_shards


def _shard_specs(state: PyTree, names: tuple[Any, ...]) -> PyTree:
  """Returns the specs of a state for a map over the axes of a model."""

  def spec_of(node: Any) -> Any:
    if isinstance(node, core.Split):
      return node.specs(names)
    own = isinstance(node, core.PerWorker)
    return PartitionSpec(names) if own else PartitionSpec()

  return jax.tree.map(
    spec_of,
    state,
    is_leaf=lambda node: isinstance(node, core.PerWorker | core.Split),
  )


def _split_arrays(args: dict[str, Any]) -> tuple[list[Any], Callable[..., Any]]:
  """Returns arguments that hold arrays, and a function that adds the others."""

  def is_mapped(arg: Any) -> bool:
    return any(hasattr(a, "dtype") for a in jax.tree.leaves(arg))

  names = [name for name, arg in args.items() if is_mapped(arg)]

  def join_args(arrays: list[Any]) -> dict[str, Any]:
    return args | dict(zip(names, arrays, strict=True))

  return [args[name] for name in names], join_args


def _args_spec(arg: Any, tree: PyTree, specs: PyTree) -> PyTree:
  """Returns the specs of an argument, which may be shaped like parameters."""
  return specs if core.same_shapes(arg, tree) else PartitionSpec()


def _manual_axes(
  specs: PyTree | None, tree: PyTree, workers: AxisName
) -> ModelAxes:
  """Returns the axes of a model that the caller's map is over too."""
  mesh = jax.sharding.get_abstract_mesh()
  names = tuple(
    name
    for name in mesh.manual_axes
    if name not in core.axis_names(workers) and mesh.shape[name] > 1
  )
  if specs is None or not names:
    return ModelAxes((), None)
  return ModelAxes(names, spread_specs(specs, tree))


def _model_axes(workers: AxisName) -> dict[Any, int]:
  """Returns the axes, with their sizes, that the partitioner is to shard
  over."""
  # There are none outside of maps, and none where a map made all axes manual.
  mesh = jax.sharding.get_abstract_mesh()
  if not set(core.axis_names(workers)) <= set(mesh.manual_axes):
    return {}
  return core.find_free_axes()


def _choose_specs(
  specs: PyTree | None, tree: PyTree, sizes: dict[Any, int]
) -> PyTree:
  """Returns a spec for every leaf, or raises if nothing tells them."""
  if specs is not None:
    return expand_specs(specs, tree, sizes)
  if _are_explicit(sizes):
    return jax.tree.map(lambda a: jax.typeof(a).sharding.spec, tree)
  raise ValueError(
    "`specs` must say how parameters are sharded over the mesh axes "
    f"{tuple(sizes)}, got None: give `make_train_step`, `init_state` or "
    "`bind_mesh` a tree of PartitionSpecs, or `specs=jax.P()` if they are not "
    "sharded."
  )


def _are_explicit(names: Iterable[Any]) -> bool:
  """Returns whether types of arrays tell how axes shard them."""
  mesh = jax.sharding.get_abstract_mesh()
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  return all(kinds[name] == AxisType.Explicit for name in names)


def _check_joined(codec: Codec, tree: PyTree, specs: PyTree) -> None:
  """Raises if a codec joins leaves of which only some are sharded."""
  # A scale of such an array would differ between devices that must hold the
  # same bits of the leaves that are not sharded.
  divided = partition(codec, tree)
  axes = [sharded_axes(spec) for spec in jax.tree.leaves(specs)]
  for group in divided.leaf_groups:
    if any(axes[i] != axes[group.leaves[0]] for i in group.leaves):
      paths = [divided.leaves[i][0] for i in group.leaves]
      raise ValueError(
        "`codec` must not join leaves that are sharded over different axes, "
        f"got {codec!r:.200} for {paths}: give `codecs.rules` one of "
        "`codecs.buckets` for those that are sharded alike."
      )
