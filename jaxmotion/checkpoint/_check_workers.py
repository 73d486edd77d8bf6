"""Check that workers still have error memory of their own."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxmotion import core
from jaxmotion.core import PyTree


def check_workers(state: PyTree) -> None:
  """Raises if all workers have the per-worker state of one of them.

  `flax.jax_utils.unreplicate` keeps the state of the first worker, and
  `replicate` gives it to all. What the others had still to send is lost. What
  the first had is then sent by all. Call this function after you restored a
  state, or put it back by code of others. It reads the state from the device,
  once, and adds nothing to a step.

  A state that no step has changed yet is accepted: its memory is zero. Memory
  is rightly equal, and refused, where workers trained on equal batches, and
  where `resize` has just continued the state of one worker.

  Args:
    state: state of an optimizer, or of a whole training, with its `PerWorker`
      nodes. Of several processes, each looks at its own workers.

  Raises:
    TypeError: a leaf is no array with values.
    ValueError: workers share a memory that is not zero; its path is named.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import PerWorker
    >>> check_workers({"error": PerWorker(jnp.arange(3.0)[:, None])})
    >>> check_workers({"error": PerWorker(jnp.ones((3, 1)))})
    Traceback (most recent call last):
    ...
    ValueError: `state` must have error memory of each worker's own, got one \
memory for all 3 at 'error': keep per-worker state whole, also in a \
checkpoint, in the place of jax_utils.unreplicate.
  """
  core.check_arrays("state", state)

  def is_own(node: Any) -> bool:
    return isinstance(node, core.PerWorker)

  for path, node in jax.tree.leaves_with_path(state, is_leaf=is_own):
    if not is_own(node):
      continue
    rows = list(zip(*map(_worker_rows, jax.tree.leaves(node)), strict=False))
    memory = [a for a in rows[0] if a.dtype.kind not in "iub"] if rows else []
    if len(rows) < 2 or not any(map(np.any, memory)):
      continue
    first = [a.tobytes() for a in rows[0]]
    if all([a.tobytes() for a in row] == first for row in rows[1:]):
      raise ValueError(
        "`state` must have error memory of each worker's own, got one memory "
        f"for all {len(rows)} at {core.leaf_path(path)!r}: keep per-worker "
        "state whole, also in a checkpoint, in the place of "
        "jax_utils.unreplicate."
      )


def _worker_rows(leaf: Any) -> Iterable[np.ndarray]:
  """Returns the rows of the workers that this process has."""
  if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
    raise TypeError(f"`state` must have arrays with values, got {leaf!r:.200}.")
  if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
    return np.asarray(leaf)
  shards = {s.index[0].start or 0: s.data for s in leaf.addressable_shards}
  return np.concatenate([np.asarray(shards[i]) for i in sorted(shards)])
