"""Maps of a function over the workers of a mesh axis."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from jaxmotion.core._compat import axis_names
from jaxmotion.core._types import AxisName, PyTree


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
  axis_name: AxisName,
  in_specs: PyTree,
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
    axis_names=set(axis_names(axis_name)),
    check_vma=False,
  )


def without_context_mesh() -> Any:
  """Returns a context in which no mesh is that of `jax.set_mesh`.

  Maps over another mesh, of workers that are not there, would be refused.
  """
  return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def place_tree(
  tree: PyTree, mesh: Mesh | AbstractMesh, specs: PyTree
) -> PyTree:
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

  def place_branch(spec: PartitionSpec, branch: PyTree) -> PyTree:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda a: jax.sharding.reshard(a, sharding), branch)

  return jax.tree.map(place_branch, specs, tree)
