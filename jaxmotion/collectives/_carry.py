"""Payloads onto the wire: words only, and few collectives.

Every array of every payload is turned into unsigned words of its own width
(backends widen narrow floats on the wire, never words), arrays of one width
are joined into one buffer, and each buffer travels in one collective.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, AxisName, PyTree, to_varying

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def gather(payload: PyTree, axis_name: AxisName) -> PyTree:
  """Returns every worker's payload: each leaf gains a leading worker axis."""

  def move(buffer: Array) -> Array:
    return lax.all_gather(buffer[0], axis_name, to="invarying")

  rows = jax.tree.map(lambda a: a[None], to_varying(payload, axis_name))
  return _carry(rows, move)


def exchange_rows(payload: PyTree, axis_name: AxisName) -> PyTree:
  """Sends row r of every leaf to worker r; returns the rows it received.

  Args:
    payload: leaves of shape (workers, ...).
    axis_name: the workers' axis.

  Returns:
    Leaves of the same shapes; row r came from worker r.
  """

  def move(buffer: Array) -> Array:
    return lax.all_to_all(buffer, axis_name, 0, 0, tiled=True)

  return _carry(to_varying(payload, axis_name), move)


def _carry(payload: PyTree, move: Callable[[Array], Array]) -> PyTree:
  """Moves leaves (rows, ...) by buffers (rows, n); `move` may add rows."""
  leaves, treedef = jax.tree.flatten(payload)
  groups: dict[Any, list[int]] = {}
  for i, leaf in enumerate(leaves):
    groups.setdefault(_WORDS[leaf.dtype.itemsize], []).append(i)
  moved: list[Any] = [None] * len(leaves)
  for word, members in groups.items():
    flat = [
      _to_words(leaves[i], word).reshape(leaves[i].shape[0], -1)
      for i in members
    ]
    # Payloads are joined, never the floats they encode: XLA:CPU would fuse
    # that concatenation into the codec, element by element.
    buffer = move(flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1))
    start = 0
    for i in members:
      leaf = leaves[i]
      size = math.prod(leaf.shape[1:])
      piece = lax.slice_in_dim(buffer, start, start + size, axis=1)
      start += size
      piece = piece.reshape(buffer.shape[0], *leaf.shape[1:])
      moved[i] = _from_words(piece, leaf.dtype)
  return jax.tree.unflatten(treedef, moved)


def _to_words(x: Array, word: Any) -> Array:
  if x.dtype == jnp.bool_:
    return x.astype(word)
  return x if x.dtype == word else lax.bitcast_convert_type(x, word)


def _from_words(x: Array, dtype: Any) -> Array:
  if dtype == jnp.bool_:
    return x.astype(dtype)
  return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
