"""Maps of a function over the workers of a mesh axis."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from jaxmotion.core import _compat, _tree, _types


def find_free_axes() -> dict[Any, int]:
  """Returns the axes, with their sizes, that no enclosing map made manual.

  There are none outside of maps. Those of one device are left out.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.manual_axes:
    return {}
  return {
    name: mesh.shape[name]
    for name in mesh.axis_names
    if name not in mesh.manual_axes and mesh.shape[name] > 1
  }


def map_local_work(
  fun: Callable[..., Any],
  mesh: Mesh,
  axis_name: _types.AxisName,
  in_specs: _types.PyTree,
) -> Callable[..., Any]:
  """Maps a function in which workers exchange nothing, such as a gradient.

  The map does not check which values vary over workers. Types would refuse
  loops whose carry starts as zeros, and JAX would sum the gradients of
  replicated parameters at full precision. Other axes of the mesh stay the
  function's: it may use constraints and maps over them.

  Args:
    fun: function whose results have a leading axis of workers, of length 1.
    mesh: device mesh that has the axis.
    axis_name: the workers' axis, or a tuple of axes.
    in_specs: partition specs of the arguments.

  Returns:
    A function like `fun` of whole arrays, to call inside `jit`.
  """
  return jax.shard_map(
    fun,
    mesh=mesh,
    in_specs=in_specs,
    out_specs=PartitionSpec(axis_name),
    axis_names=set(_compat.axis_names(axis_name)),
    check_vma=False,
  )


def without_context_mesh() -> Any:
  """Returns a context in which no mesh is that of `jax.set_mesh`.

  Maps over another mesh, of workers that are not there, would be refused.
  """
  return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def put_on_mesh(
  tree: _types.PyTree, mesh: Mesh, specs: _types.PyTree
) -> _types.PyTree:
  """Puts arrays on a mesh that are bound to other devices than its own.

  A compiled function refuses such arrays, which checkpoints and
  `jax.device_put(x, device)` give. It places all others by itself.

  Args:
    tree: pytree of arrays; tracers stay.
    mesh: device mesh.
    specs: partition specs, a prefix of the tree.
  """

  def put_branch(spec: PartitionSpec, branch: _types.PyTree) -> _types.PyTree:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
      lambda x: x if is_on_mesh(x, mesh) else jax.device_put(x, sharding),
      branch,
    )

  return jax.tree.map(put_branch, specs, tree)


def is_on_mesh(x: Any, mesh: Mesh) -> bool:
  """Says whether a function over a mesh can be called with a leaf."""
  if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
    return True
  return not x.committed or x.sharding.device_set == set(mesh.devices.flat)


def check_on_mesh(args: Mapping[str, _types.PyTree], mesh: Mesh) -> None:
  """Raises if an array is bound to other devices than those of a mesh.

  Args:
    args: the arguments of a call, by name.
    mesh: device mesh.

  Raises:
    ValueError: one is; it is named by its path.
  """
  for name, tree in args.items():
    for path, leaf in _tree.named_leaves(tree):
      if is_on_mesh(leaf, mesh):
        continue
      devices = sorted(leaf.sharding.device_set, key=lambda d: d.id)
      names = ", ".join(f"{d.platform}:{d.id}" for d in devices)
      raise ValueError(
        f"`{'/'.join(filter(None, (name, path)))}` must be on the {mesh.size} "
        f"devices of the mesh, got an array on {names}: give a NumPy array, or "
        "call jax.device_put(x, jax.NamedSharding(mesh, spec))."
      )


def place_tree(
  tree: _types.PyTree, mesh: Mesh | AbstractMesh, specs: _types.PyTree
) -> _types.PyTree:
  """Gives arrays the sharding that a map over explicit axes asks for.

  JAX moves arrays to the sharding of a map by itself, but for explicit axes,
  where it raises an error instead.

  Args:
    tree: arrays, inside of a jitted function.
    mesh: the mesh of the map.
    specs: partition specs, a prefix of the tree.
  """
  if AxisType.Explicit not in mesh.axis_types:
    return tree

  def place_branch(spec: PartitionSpec, branch: _types.PyTree) -> _types.PyTree:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda a: jax.sharding.reshard(a, sharding), branch)

  return jax.tree.map(place_branch, specs, tree)
