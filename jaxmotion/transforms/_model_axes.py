"""Axes of a sharded model: specs, shardings of states, exchange of shards.

Parameters may be sharded over axes of the mesh that are not the workers'. XLA's
partitioner would gather their gradients before a codec sees them, or fail. So
an inner map makes these axes manual as well. Every device encodes its own
shard, sends only that, and remembers only the error of that.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

from jaxmotion import core, hosts
from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives.extend import check_weight
from jaxmotion.core import AxisName, PyTree


def partition_specs(name: str, specs: PyTree) -> PyTree:
  """Returns a tree of partition specs, or raises."""
  for path, spec in core.named_leaves(specs):
    if not isinstance(spec, P):
      at = f" at {path!r}" if path else ""
      raise TypeError(
        f"`{name}` must be a tree of PartitionSpecs, got {spec!r:.200}{at}."
      )
  return specs


def check_specs(specs: PyTree, workers: AxisName) -> None:
  """Raises unless a tree holds partition specs over axes of the model."""
  for path, spec in core.named_leaves(partition_specs("specs", specs)):
    at = f" at {path!r}" if path else ""
    if shared := sharded_axes(spec) & set(core.axis_names(workers)):
      raise ValueError(
        "`specs` must name axes of the model, not those of the workers, who "
        f"all hold the same parameters, got {sorted(shared)}{at}."
      )


def sharded_axes(spec: P) -> set[Any]:
  """Returns the names of the axes that a spec shards over."""
  return {name for entry in spec for name in core.spec_axes(entry)}


def _expand_specs(specs: PyTree, tree: PyTree, sizes: dict[Any, int]) -> PyTree:
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
    return jax.tree.broadcast(specs, tree)
  except (TypeError, ValueError) as error:
    raise ValueError(
      "`specs` must be a PartitionSpec or a tree of them like the parameters, "
      f"{jax.tree.structure(tree)}, got {jax.tree.structure(specs)}."
    ) from error


class ModelAxes(NamedTuple):
  """Axes of the model that a map made manual, as an exchange sees them."""

  names: tuple[Any, ...]  # () if a leaf is whole on every device.
  specs: PyTree  # Partition spec of each leaf of the parameters over them.

  @property
  def leaf_specs(self) -> list[P]:
    """The spec of each leaf."""
    return jax.tree.leaves(self.specs)

  def assert_shared(self, x: Any, spec: P) -> Any:
    """Types an array as equal along axes that do not shard it."""
    # All devices of a worker encode such an array alike.
    used = sharded_axes(spec)
    axes = tuple(n for n in self.names if n not in used)
    return core.assert_replicated(x, axes) if axes else x


def map_exchange(
  shard_exchange: Any, options: Any, codecs: Sequence[Codec]
) -> tuple[Callable[[PyTree], Any], Callable[..., tuple[PyTree, Any]]]:
  """Makes `init` and `update` of `exchange` or `sharded`, also of shards."""
  # Where axes of the model are not manual, they are so in a map of their own:
  # every device exchanges its shards by themselves.
  # shard_exchange: what one device does: its `workers`, `init` and `update`.
  # codecs: those that may join leaves. `update` takes a state that is checked.
  workers = shard_exchange.workers

  def make_state(params: PyTree, specs: PyTree | None) -> Any:
    """Makes the state of an exchange, which notes the tree that it is for."""
    core.know_in_flax(type(options))
    # `shard_states` calls it again with specs, which `init` of an optax chain
    # does not take. Without specs the state is that of whole arrays.
    made_for = dataclasses.replace(options, init=make_state)
    model, axes = _find_model(specs, params, workers, is_update=False)
    init_own = functools.partial(shard_exchange.init, model=model)
    if axes:  # The state of every device's shards.
      maps = _map_options(workers, axes, (model.specs,))
      shapes = core.eval_shape_in_map(init_own, maps, params)
      out_specs = _shard_specs(shapes, model.names)
      init_own = jax.shard_map(init_own, out_specs=out_specs, **maps)
    return init_own(params)._replace(made_for=made_for.note_tree(params, specs))

  @core.declare(params=core.typed_arrays)
  def init(params: PyTree) -> Any:
    return make_state(params, None)

  def update(
    updates: PyTree, state: Any, params: PyTree, args: dict[str, Any]
  ) -> tuple[PyTree, Any]:
    """Exchanges updates, on shards where axes of a model are not manual."""
    check_weight("weight", args["weight"])
    args = args | {"sending": hosts.check_sending(args["sending"])}
    # The options are no arrays, so a map does not take them.
    made_for, state = state.made_for, state._replace(made_for=None)
    model, axes = _find_model(made_for.specs, updates, workers, is_update=True)
    if axes:
      for codec in codecs:
        _check_joined(codec, updates, model.specs)
      run = functools.partial(_map_update, shard_exchange, axes)
    else:
      run = shard_exchange.update
    updates, state = run(updates, state, params, args, model)
    return updates, state._replace(made_for=made_for)

  return init, update


def _map_update(
  shard_exchange: Any,
  axes: tuple[Any, ...],
  updates: PyTree,
  state: PyTree,
  params: PyTree,
  args: dict[str, Any],
  model: ModelAxes,
) -> tuple[PyTree, PyTree]:
  """Runs an exchange in a `shard_map` over a model's axes, on each shard."""
  # Branches wait for scalars alone: the map would cut other arrays.
  args = args | {"sending": args["sending"].keep_scalars()}
  arrays = select_arrays(args)

  def update_own(
    updates: PyTree, state: PyTree, params: PyTree, arrays: dict[str, Any]
  ) -> PyTree:
    mean, state = shard_exchange.update(
      updates, state, params, args | arrays, model
    )
    return jax.tree.map(model.assert_shared, mean, model.specs), state

  state_specs = _shard_specs(state, model.names)
  in_specs = (
    model.specs,
    state_specs,
    P() if params is None else model.specs,
    # An argument may be shaped like parameters.
    {
      name: model.specs if core.same_shapes(arg, updates) else P()
      for name, arg in arrays.items()
    },
  )
  mapped = jax.shard_map(
    update_own,
    out_specs=(model.specs, state_specs),
    **_map_options(shard_exchange.workers, axes, in_specs),
  )
  return mapped(updates, state, params, arrays)


def select_arrays(args: dict[str, Any]) -> dict[str, Any]:
  """Returns the arguments that hold arrays: a map closes over the others."""
  return {
    name: arg
    for name, arg in args.items()
    if any(hasattr(a, "dtype") for a in jax.tree.leaves(arg))
  }


def _map_options(
  workers: AxisName, names: Any, in_specs: Any
) -> dict[str, Any]:
  """Returns arguments of `jax.shard_map` over the axes of a model."""
  return dict(
    in_specs=in_specs,
    axis_names=set(names),
    check_vma=core.tracks_varying(workers),
  )


def _shard_specs(state: PyTree, names: tuple[Any, ...]) -> PyTree:
  """Returns the specs of an exchange's state for a map over a model's axes."""

  def spec_of(node: Any) -> Any:
    if isinstance(node, core.Split):
      return node.specs(names)
    return P(names) if isinstance(node, core.PerWorker) else P()

  return jax.tree.map(spec_of, state, is_leaf=core.is_marked)


def _find_model(
  specs: PyTree | None, tree: PyTree, workers: AxisName, *, is_update: bool
) -> tuple[ModelAxes, tuple[Any, ...]]:
  """Finds the axes of a model, and those that need a map of their own."""
  mesh, names = jax.sharding.get_abstract_mesh(), core.axis_names(workers)
  # There are none outside of maps, and none where a map made all axes manual.
  sizes = core.find_free_axes()
  if sizes and set(names) <= set(mesh.manual_axes):
    if specs is not None:
      specs = _expand_specs(specs, tree, sizes)
      return ModelAxes(tuple(sizes), specs), tuple(sizes)
    if set(sizes) <= set(mesh.explicit_axes):
      specs = jax.tree.map(lambda a: jax.typeof(a).sharding.spec, tree)
      return ModelAxes(tuple(sizes), specs), tuple(sizes)
    if is_update:
      if core.tracks_varying(workers):
        raise ValueError(
          "`specs` must say how parameters are sharded over the mesh axes "
          f"{tuple(sizes)}, got None: give `make_train_step` or `bind_mesh` a "
          "tree of PartitionSpecs, or `specs=jax.P()` if they are not sharded."
        )
      # A map without types leaves other axes to the caller, who gives specs, or
      # has whole arrays. XLA would divide what encodes those between devices.
      free = tuple(n for n in sizes if n not in mesh.explicit_axes)
      return ModelAxes((), spread_specs(P(), tree)), free
  # The caller's map may be over axes of the model too.
  others = tuple(n for n in mesh.manual_axes if n not in names)
  manual = tuple(n for n in others if mesh.shape[n] > 1)
  if specs is None or not manual:
    manual, specs = (), P()
  return ModelAxes(manual, spread_specs(specs, tree)), ()


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


class Shardings:
  """Says how parameters, states and gradients are sharded over a mesh."""

  def __init__(
    self, mesh: Mesh | AbstractMesh, axis_name: AxisName, specs: PyTree | None
  ):
    # mesh: one without devices places nothing. specs: how parameters are
    # sharded over the other axes, a prefix of their tree.
    check_specs(specs, axis_name)
    self._mesh, self.axis_name = mesh, axis_name
    self._workers = core.axis_names(axis_name)
    shape = dict(mesh.shape)
    # Axes of one device shard nothing. Those that the mesh lacks are kept, and
    # then refused.
    is_kept = lambda name: shape.get(name) != 1
    self.specs = jax.tree.map(
      lambda spec: core.filter_spec(spec, is_kept), specs
    )
    self._sizes = {n: shape[n] for n in shape if n not in self._workers}
    # Without specs, maps are over all axes of the mesh and parameters are
    # replicated. With them, maps are over the workers' axes only, and the other
    # axes are the partitioner's.
    self.map_options: dict[str, Any] = {"mesh": mesh}
    self._model_names: tuple[Any, ...] = ()
    if specs is not None:
      self.map_options["axis_names"] = set(self._workers)
      self._model_names = tuple(n for n, k in self._sizes.items() if k > 1)

  def check_params(self, params: PyTree) -> None:
    """Raises if parameters are sharded over an axis that no spec names."""
    # They would be replicated without a word.
    if self.specs is not None:
      self.params(params)
      return
    for path, leaf in core.named_leaves(params):
      sharding = getattr(leaf, "sharding", None)
      if not isinstance(sharding, NamedSharding):
        continue
      shape = dict(sharding.mesh.shape)
      others = sharded_axes(sharding.spec) - set(self._workers)
      if any(shape[name] > 1 for name in others):
        raise ValueError(
          "`specs` must say how parameters are sharded over axes of the model, "
          f"got None for {'/'.join(filter(None, ('params', path)))} of "
          f"{sharding.spec}: give them to `make_train_step` or "
          "`bind_mesh`."
        )

  def params(self, params: PyTree) -> PyTree:
    """Returns the specs of parameters, a prefix of their tree."""
    if self.specs is None:
      return P()
    return _expand_specs(self.specs, params, self._sizes)

  def model(self, params: PyTree) -> ModelAxes:
    """Returns the axes of the model, and the spec of every parameter."""
    specs = spread_specs(self.params(params), params)
    return ModelAxes(self._model_names, specs)

  def grads(self, params: PyTree) -> PyTree:
    """Returns the specs of gradients with a leading axis of workers."""
    return jax.tree.map(
      lambda spec: P(self.axis_name, *spec), self.params(params)
    )

  def state(self, opt_state: PyTree, params: PyTree) -> PyTree:
    """Returns the specs of an optimizer's state, a prefix of its tree."""
    if self.specs is None:
      return core.state_specs(opt_state, self.axis_name)
    # A leaf is sharded like the parameter whose path ends its own, if the shape
    # is the same: moments and averages are.
    param_specs = {
      (path, jnp.shape(leaf)): spec
      for (path, leaf), spec in zip(
        jax.tree.leaves_with_path(params),
        jax.tree.leaves(self.params(params)),
        strict=True,
      )
    }
    names = (*self._workers, *self._model_names)
    devices = core.count_devices(names, self._mesh.shape)

    def find_spec(path: Any, shape: tuple[int, ...]) -> P:
      """Returns the spec of the parameter that an array is like, or P()."""
      suffixes = [(path[start:], shape) for start in range(len(path) + 1)]
      return next(
        (param_specs[end] for end in suffixes if end in param_specs), P()
      )

    def node_specs(path: Any, node: Any) -> Any:
      """Returns the specs of a leaf, or of a node that workers divide."""
      if isinstance(node, core.Split):  # Its parts are the workers'.
        return node.specs()
      if not isinstance(node, core.PerWorker):
        return find_spec(path, node.shape)

      def own_spec(inner: Any, leaf: Any) -> Any:
        """Returns the spec of a leaf with a leading axis of workers."""
        if isinstance(leaf, core.Shared):
          others = tuple(n for n in names if n not in leaf.axes)
          return jax.tree.map(lambda _: P(others or None), leaf)
        # One row for each device: the exchange's. Else one for each worker.
        if self._model_names and leaf.shape[0] == devices:
          return P(names)
        return P(self.axis_name, *find_spec(inner, leaf.shape[1:]))

      return jax.tree.map_with_path(
        own_spec, node, is_leaf=lambda leaf: isinstance(leaf, core.Shared)
      )

    return jax.tree.map_with_path(node_specs, opt_state, is_leaf=core.is_marked)

  def place(self, tree: PyTree, specs: PyTree) -> PyTree:
    """Gives arrays, inside of a jitted function, the shardings of specs."""
    # specs: a prefix of the tree.
    tree = core.place_tree(tree, self._mesh, specs)
    if self.specs is None or self._mesh.explicit_axes:
      return tree
    shardings = jax.tree.map(lambda s: NamedSharding(self._mesh, s), specs)
    return jax.lax.with_sharding_constraint(tree, shardings)
