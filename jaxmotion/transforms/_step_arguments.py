"""Arguments of training steps that are mapped over workers."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _init_state, _model_axes, _run_on_workers


def check_step_mesh(mesh: Any, axis_name: Any) -> None:
  """Raises unless a step can be mapped over the axes of a mesh.

  Args:
    mesh: device mesh.
    axis_name: the workers' axis, or a tuple of axes.

  Raises:
    TypeError: an argument of another type.
    ValueError: the mesh has no such axis.
  """
  core.check_instance("mesh", mesh, Mesh, "a jax.sharding.Mesh")
  core.check_axis_name("axis_name", axis_name)
  _init_state.check_axes(mesh, axis_name)


def check_names(name: str, value: Any) -> tuple[str, ...]:
  """Returns the strings of a list or tuple, or raises."""
  names = core.check_sequence(name, value, "strings")
  for item in names:
    core.check_text(name, item)
  return names


def check_batch_names(value: Any) -> tuple[str, ...]:
  """Returns the names of the parameters that are split, or raises.

  Args:
    value: one name or several, as the caller gave them.
  """
  names = check_names("batch", (value,) if isinstance(value, str) else value)
  if not names:
    raise ValueError(
      f"`batch` must name a parameter of the step at least, got {value!r}."
    )
  return names


def split_specs(
  name: str,
  batch: PyTree,
  mesh: Mesh,
  axis_name: AxisName,
  microbatches: int = 1,
) -> PyTree:
  """Returns the specs of a batch that is split along its leading axis.

  Args:
    name: the argument's name, for the message.
    batch: pytree of arrays; scalars are replicated.
    mesh: device mesh that has the axis.
    axis_name: the workers' axis.
    microbatches: number of parts that divide a worker's examples.

  Raises:
    ValueError: the workers do not divide a leading axis, or a leaf is one key,
      of which all workers would draw the same numbers.
  """
  workers = math.prod(mesh.shape[axis] for axis in core.axis_names(axis_name))

  def find_spec(path: str, leaf: Any) -> P:
    at = f" at `{path}`" if path else ""
    shape = jnp.shape(leaf)
    if not shape and _run_on_workers.is_key(leaf):
      raise ValueError(
        f"`{name}` must not hold a key for all workers, who would draw the "
        f"same numbers, got one{at}: give the key to the step by itself."
      )
    if not shape:
      return P()
    if shape[0] % workers:
      raise ValueError(
        f"`{name}` must have leaves with a leading axis of examples that "
        f"{workers} workers divide, got shape {shape}{at}: drop or pad the "
        "last examples."
      )
    own = shape[0] // workers
    if own % microbatches:
      raise ValueError(
        f"`microbatches` must divide the {own} examples of a worker, got "
        f"{microbatches} for a `{name}` of shape {shape}{at}."
      )
    return P(axis_name)

  specs = [find_spec(path, leaf) for path, leaf in core.named_leaves(batch)]
  return jax.tree.unflatten(jax.tree.structure(batch), specs)


def place_arguments(
  tree: PyTree, mesh: Mesh, specs: PyTree, axis_name: AxisName
) -> PyTree:
  """Puts arrays on the mesh, where a compiled step returns them.

  Otherwise the second call of the step would compile again.

  Args:
    tree: pytree of arrays; tracers and what is no array of JAX stay.
    mesh: device mesh of the step.
    specs: partition spec of each leaf over the workers.
    axis_name: the workers' axis; how arrays are split over others stays.
  """
  workers = set(core.axis_names(axis_name))

  def place_leaf(x: Any, spec: P) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
      return x
    sharding = NamedSharding(mesh, spec)
    old = x.sharding
    if isinstance(old, NamedSharding) and old.mesh == mesh:
      if workers & _model_axes.sharded_axes(
        old.spec
      ) == workers & _model_axes.sharded_axes(spec):
        return x
    if x.sharding == sharding or x.sharding.is_equivalent_to(sharding, x.ndim):
      return x
    return jax.device_put(x, sharding)

  return jax.tree.map(place_leaf, tree, specs)
