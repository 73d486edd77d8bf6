"""Arguments of training steps: their checks, and where workers get them."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _model_axes
from jaxmotion.transforms.step import _run_on_workers


def check_names(name: str, value: Any) -> tuple[str, ...]:
  """Returns the strings of a list or tuple, or raises."""
  names = core.check_sequence(name, value, "strings")
  for item in names:
    core.check_text(name, item)
  return names


def check_step_key(key: Any) -> None:
  """Raises unless `key` is one key of `jax.random`, typed or raw."""
  if key is None:
    return
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  if not (_run_on_workers.is_key(key) and shape == ()) and not (
    dtype == jnp.uint32 and shape is not None and len(shape) == 1
  ):
    found = f"{dtype}{list(shape)}" if shape is not None else f"{key!r:.200}"
    raise TypeError(
      f"`key` must be one key of jax.random.key(seed), got {found}."
    )


def make_worker_keys(key: Array, count: Array, workers: int) -> Array:
  """Returns the key of every worker in this step, shape (workers, ...)."""
  # It is `fold_in(fold_in(key, count), worker)`. `count`: int32[], steps so
  # far.
  key = jax.random.fold_in(key, count)
  fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
  return fold(key, jnp.arange(workers))


def split_specs(
  name: str,
  batch: PyTree,
  mesh: Mesh,
  axis_name: AxisName,
  microbatches: int = 1,
  *,
  optional: bool = False,
) -> PyTree:
  """Returns the specs of a batch that is split along its leading axis."""
  # microbatches: number of parts that divide a worker's examples. Scalars are
  # replicated.
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
    if not shape[0] or shape[0] % workers:
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

  leaves = core.named_leaves(batch)
  if not leaves and not (optional and batch is None):
    raise ValueError(f"`{name}` must have a leaf with examples, got {batch!r}.")
  specs = [find_spec(path, leaf) for path, leaf in leaves]
  _check_rows(name, leaves)
  return jax.tree.unflatten(jax.tree.structure(batch), specs)


def _check_rows(name: str, leaves: Sequence[tuple[str, Any]]) -> None:
  """Raises if leaves of a batch have other numbers of rows."""
  # Workers would broadcast their parts where the whole batch does not fit. Keys
  # are left out: there may be one for each worker.
  rows = [
    (path, leaf.shape[0])
    for path, leaf in leaves
    if jnp.ndim(leaf) and not _run_on_workers.is_key(leaf)
  ]
  for path, count in rows:
    first, wanted = rows[0]
    if count != wanted:
      raise ValueError(
        f"`{name}` must have leaves with as many rows as one another, got "
        f"{wanted} at `{first}` and {count} at `{path}`."
      )


def place_arguments(
  tree: PyTree, mesh: Mesh, specs: PyTree, axis_name: AxisName
) -> PyTree:
  """Puts arrays on the mesh, where a compiled step returns them."""
  # Otherwise the second call of the step would compile again.
  # specs: one for each leaf, over the workers; how arrays are split over other
  # axes stays. So do tracers and what is no array of JAX.
  workers = set(core.axis_names(axis_name))

  def place_leaf(x: Any, spec: P) -> Any:
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
      return x
    sharding = NamedSharding(mesh, spec)
    old = x.sharding
    if isinstance(old, NamedSharding) and old.mesh == mesh:
      held, wanted = map(_model_axes.sharded_axes, (old.spec, spec))
      if workers & held == workers & wanted:
        return x
    if old.is_equivalent_to(sharding, x.ndim):
      return x
    return jax.device_put(x, sharding)

  return jax.tree.map(place_leaf, tree, specs)
