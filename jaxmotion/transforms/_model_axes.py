"""Exchange of shards: an inner map over the axes of a sharded model.

Parameters may be sharded over axes of the mesh that are not the workers'. XLA's
partitioner would gather their gradients before a codec sees them, or fail. So
an inner map makes these axes manual as well: every device encodes its own
shard, sends only that, and remembers only the error of that.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, PartitionSpec

from jaxmotion.codecs import Codec
from jaxmotion.codecs.extend import partition
from jaxmotion.core import (
  AxisName,
  PyTree,
  assert_replicated,
  axis_names,
  named_leaves,
  state_specs,
  tracks_varying,
)


def check_specs(specs: PyTree, workers: AxisName) -> None:
  """Raises unless a tree holds partition specs over axes of the model.

  Args:
    specs: what the caller gave; None will do.
    workers: axes of the workers, which may not be among them.

  Raises:
    TypeError: a leaf is no PartitionSpec.
    ValueError: a spec names an axis of the workers.
  """
  for path, spec in named_leaves(specs):
    at = f" at {path!r}" if path else ""
    if not isinstance(spec, PartitionSpec):
      raise TypeError(
        f"`specs` must be a tree of PartitionSpecs, got {spec!r:.200}{at}."
      )
    if shared := sharded_axes(spec) & set(axis_names(workers)):
      raise ValueError(
        "`specs` must name axes of the model, not those of the workers, who "
        f"all hold the same parameters, got {sorted(shared)}{at}."
      )


def sharded_axes(spec: PartitionSpec) -> set[Any]:
  """Returns the names of the axes that a spec shards over."""
  entries = [e if isinstance(e, tuple) else (e,) for e in spec]
  return {name for entry in entries for name in entry} - {None}


def expand_specs(specs: PyTree, tree: PyTree, sizes: dict[Any, int]) -> PyTree:
  """Returns a spec for every leaf of a tree.

  Args:
    specs: partition specs, a prefix of the tree.
    tree: pytree of arrays or shapes, such as the parameters.
    sizes: sizes of the mesh's axes by name.

  Raises:
    ValueError: the specs are no prefix of the tree, name an axis that the mesh
      does not have, or shard a dimension that the axis does not divide.
  """
  try:
    full = jax.tree.map(
      lambda spec, branch: jax.tree.map(lambda _: spec, branch), specs, tree
    )
  except (TypeError, ValueError) as error:
    raise ValueError(
      "`specs` must be a PartitionSpec or a tree of them like the parameters, "
      f"{jax.tree.structure(tree)}, got {jax.tree.structure(specs)}."
    ) from error
  for (path, leaf), spec in zip(
    named_leaves(tree), jax.tree.leaves(full), strict=True
  ):
    shape = jnp.shape(leaf)
    at = f" at {path!r}" if path else ""
    if missing := sharded_axes(spec) - set(sizes):
      raise ValueError(
        f"`specs` must name axes of the mesh {tuple(sizes)}, got "
        f"{sorted(missing)}{at}."
      )
    parts = [
      math.prod(sizes[n] for n in sharded_axes(PartitionSpec(entry)))
      for entry in spec
    ]
    if len(parts) > len(shape) or any(
      n % k for n, k in zip(shape, parts, strict=False)
    ):
      raise ValueError(
        "`specs` must shard dimensions that the axes divide, got "
        f"{spec}{at} of shape {shape}."
      )
  return full


def map_model_axes(
  tx: optax.GradientTransformationExtraArgs,
  specs: PyTree | None,
  workers: AxisName,
  codecs: Sequence[Codec],
) -> optax.GradientTransformationExtraArgs:
  """Runs an exchange on the shards of a model, where its axes are not manual.

  Args:
    tx: the exchange, whose `update` takes `model_axes=`: the axes that the
      inner map made manual.
    specs: partition specs of the parameters over the model's axes, a prefix of
      their tree. None takes them from the types of the arrays, if the axes are
      explicit.
    workers: axes of the workers.
    codecs: codecs that `tx` encodes with.
  """

  def find_axes() -> dict[Any, int]:
    sizes = _model_axes(workers)
    # A map without types leaves other axes to the caller, who gives specs.
    if sizes and specs is None and not tracks_varying(workers):
      return {}
    return sizes

  def init_fn(params: PyTree) -> PyTree:
    sizes = find_axes()
    if not sizes:
      return tx.init(params)
    param_specs = _choose_specs(specs, params, sizes)
    found: list[PyTree] = []

    def trace_init(params: PyTree) -> jax.Array:
      found.append(jax.tree.map(jax.typeof, tx.init(params)))
      return jnp.zeros(())

    def bind(fun: Any, out_specs: PyTree) -> Any:
      return jax.shard_map(
        fun,
        in_specs=(param_specs,),
        out_specs=out_specs,
        axis_names=set(sizes),
        check_vma=tracks_varying(workers),
      )

    jax.eval_shape(bind(trace_init, PartitionSpec()), params)
    return bind(tx.init, state_specs(found[0], tuple(sizes)))(params)

  def update_fn(
    updates: PyTree,
    state: PyTree,
    params: PyTree | None = None,
    *,
    weight: Any = None,
    level: Any = None,
    **extra_args: Any,
  ) -> tuple[PyTree, PyTree]:
    del extra_args
    sizes = find_axes()
    if not sizes:
      return tx.update(updates, state, params, weight=weight, level=level)
    update_specs = _choose_specs(specs, updates, sizes)
    for codec in codecs:
      _check_joined(codec, updates, update_specs)
    given = {"weight": weight, "level": level}

    def update_shards(
      updates: PyTree, state: PyTree, given: dict[str, Any]
    ) -> tuple[PyTree, PyTree]:
      mean, state = tx.update(updates, state, **given, model_axes=tuple(sizes))
      # All devices of a worker encode such a leaf alike.
      mean = jax.tree.map(
        lambda a, spec: assert_replicated(
          a, tuple(n for n in sizes if n not in sharded_axes(spec))
        ),
        mean,
        update_specs,
      )
      return mean, state

    specs_of_state = state_specs(state, tuple(sizes))
    return jax.shard_map(
      update_shards,
      in_specs=(update_specs, specs_of_state, PartitionSpec()),
      out_specs=(update_specs, specs_of_state),
      axis_names=set(sizes),
      check_vma=tracks_varying(workers),
    )(updates, state, given)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _model_axes(workers: AxisName) -> dict[Any, int]:
  """Returns the axes, with their sizes, that the partitioner is to shard over.

  There are none outside of maps, and none where a map made all axes manual.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not set(axis_names(workers)) <= set(mesh.manual_axes):
    return {}
  return {
    name: mesh.shape[name]
    for name in mesh.axis_names
    if name not in mesh.manual_axes and mesh.shape[name] > 1
  }


def _choose_specs(
  specs: PyTree | None, tree: PyTree, sizes: dict[Any, int]
) -> PyTree:
  """Returns a spec for every leaf, or raises if nothing tells them."""
  if specs is not None:
    return expand_specs(specs, tree, sizes)
  mesh = jax.sharding.get_abstract_mesh()
  kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  if all(kinds[name] == AxisType.Explicit for name in sizes):
    return jax.tree.map(lambda a: jax.typeof(a).sharding.spec, tree)
  raise ValueError(
    "`specs` must say how parameters are sharded over the mesh axes "
    f"{tuple(sizes)}, got None: give `exchange` a tree of PartitionSpecs, or "
    "`specs=jax.P()` if they are not sharded."
  )


def _check_joined(codec: Codec, tree: PyTree, specs: PyTree) -> None:
  """Raises if a codec joins leaves of which only some are sharded.

  A scale of such an array would differ between devices that must hold the same
  bits of the leaves that are not sharded.
  """
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
