"""Arguments of training steps: checks of keys, and specs of batches."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree


def step_key(name: str, key: Any) -> Any:
  """Returns one key of `jax.random`, typed or raw, or None; or raises."""
  if key is None:
    return None
  dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
  is_typed = core.is_key(key) and shape == ()
  is_raw = dtype == jnp.uint32 and shape is not None and len(shape) == 1
  if not (is_typed or is_raw):
    found = f"{dtype}{list(shape)}" if shape is not None else f"{key!r:.200}"
    raise TypeError(
      f"`{name}` must be one key of jax.random.key(seed), got {found}."
    )
  return key


def split_specs(
  name: str,
  batch: PyTree,
  mesh: Mesh,
  axis_name: AxisName,
  microbatches: int = 1,
) -> PyTree:
  """Returns the specs of a batch that is split along its leading axis."""
  # microbatches: number of parts that divide a worker's examples. Scalars are
  # replicated.
  workers = core.count_devices(axis_name, mesh.shape)

  def find_spec(path: str, leaf: Any) -> P:
    """Returns the spec of a leaf; raises unless its rows can be divided."""
    at = f" at `{path}`" if path else ""
    shape = jnp.shape(leaf)
    if not shape and core.is_key(leaf):
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
  if not leaves:
    raise ValueError(f"`{name}` must have a leaf with examples, got {batch!r}.")
  specs = [find_spec(path, leaf) for path, leaf in leaves]
  # Workers would broadcast their parts where the whole batch does not fit. Keys
  # are left out: there may be one for each worker.
  rows = [
    (path, leaf.shape[0])
    for path, leaf in leaves
    if jnp.ndim(leaf) and not core.is_key(leaf)
  ]
  for path, count in rows:
    first, wanted = rows[0]
    if count != wanted:
      raise ValueError(
        f"`{name}` must have leaves with as many rows as one another, got "
        f"{wanted} at `{first}` and {count} at `{path}`."
      )
  return jax.tree.unflatten(jax.tree.structure(batch), specs)
