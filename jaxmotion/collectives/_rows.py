"""Rows of an array, one for each worker, that are encoded one by one."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core, kernels
from jaxmotion.collectives import _arguments, _layout
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike

# Fewer values are padded as a whole, by one kernel less.
_MIN_PARTED = 1 << 16


def check_rows(name: str, x: Array, axis: int, axis_name: AxisName) -> int:
  """Returns the axis as a non-negative int; raises unless workers divide it."""
  workers = _arguments.count_workers(axis_name)
  _arguments.check_shaped("x", x)
  axis = _arguments.check_position(name, axis, len(x.shape))
  if x.shape[axis] % workers:
    raise ValueError(
      f"`{name}` must be an axis whose length {workers} workers divide, "
      f"got {axis} of {core.shape_string(x)}."
    )
  return axis


def to_rows(x: Array, axis: int, workers: int) -> Array:
  """Splits `x` along an axis into equal rows: (workers, ...)."""
  return jnp.stack(jnp.split(x, workers, axis))


def pad_to_rows(x: Array, workers: int) -> Array:
  """Pads `x` with zeros and splits it into rows of `row_like(x, workers)`."""
  row = _layout.row_like(x, workers)
  rows = x.reshape(-1, *row.shape[1:])
  if padding := workers * row.shape[0] - rows.shape[0]:
    # A codec reads it several times.
    rows = core.pad_apart(rows, padding, jnp.zeros((), x.dtype))
  return rows.reshape(workers, *row.shape)


def encode_shards(
  codec: codecs.Codec,
  x: Array,
  workers: int,
  state: PyTree,
  key: core.Key | None,
) -> tuple[PyTree, PyTree]:
  """Splits `x` into rows of `row_like(x, workers)` and encodes each by
  itself."""
  # Returns payload and state, whose leaves have a leading axis of rows.
  whole = lambda: encode_rows(codec, pad_to_rows(x, workers), state, key)
  if x.size < _MIN_PARTED or jax.tree.leaves(state):
    return whole()  # States of two parts would be joined by a copy.
  row = _layout.row_like(x, workers)
  flat = x.reshape(-1, *row.shape[1:])
  full = flat.shape[0] // row.shape[0]
  if full == workers:
    return whole()
  # Padding the whole array would be a copy of it, so only what is left beyond
  # the full rows is padded.
  start, padding = full * row.shape[0], workers * row.shape[0] - flat.shape[0]
  left = core.pad_apart(flat[start:], padding, jnp.zeros((), x.dtype))
  encode = jax.vmap(lambda x, key: codec.encode(x, state, key)[0])
  keys = _fold_rows(key, workers)
  payloads = [
    encode(
      part.reshape(-1, *row.shape), jax.tree.map(lambda a, i=i: a[i], keys)
    )
    for i, part in (
      (slice(full), flat[:start]),
      (slice(full, workers), left),
    )
  ]
  return jax.tree.map(lambda *a: jnp.concatenate(a), *payloads), state


def join_rows(rows: Array, like: ShapedLike) -> Array:
  """Inverts `pad_to_rows`: drops the padding, restores the shape."""
  if rows.ndim == 3:
    # Whole rows are dropped: then XLA:CPU divides no index once an element.
    minor = rows.shape[2]
    matrix = rows.reshape(-1, minor)
    return matrix[: math.prod(like.shape) // minor].reshape(like.shape)
  size, (workers, width) = math.prod(like.shape), rows.shape
  join: Callable[[Array], Array] = lambda rows: rows.reshape(-1)[:size]
  # Whatever reads a vector divides each index by the width. By a power of two
  # that is a shift.
  if width & (width - 1) and kernels.is_read_slowly((size,), 1, workers, width):
    join = functools.partial(core.write_apart, join)
  return join(rows).reshape(like.shape)


def to_encode_dtype(codec: codecs.Codec, x: Array, dtype: Any = None) -> Array:
  """Returns `x` in the dtype it is encoded in: float32 at least."""
  # A codec of float32 decodes to float32 too, so sums over workers are made
  # before anything is rounded to the dtype of `x`. A codec that keeps the
  # array's dtype gets the array in that dtype.
  if codec.keeps_dtype:
    return x if dtype is None else core.saturate_cast(x, dtype)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def encode_rows(
  codec: codecs.Codec, rows: Array, state: PyTree, key: core.Key | None
) -> tuple[PyTree, PyTree]:
  """Encodes each row by itself; payload, state and key have a row axis."""
  return jax.vmap(codec.encode)(rows, state, _fold_rows(key, rows.shape[0]))


def _fold_rows(key: core.Key | None, rows: int) -> core.Key | None:
  """Returns a key for each row, stacked."""
  if key is None:
    return None
  return core.write_apart(lambda key: jax.vmap(key.fold)(jnp.arange(rows)), key)
