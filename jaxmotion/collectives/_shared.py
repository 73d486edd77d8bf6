"""What the collectives have in common."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs import Codec
from jaxmotion.collectives._layout import row_like
from jaxmotion.collectives._transport import halves, in_turns
from jaxmotion.core import (
  Array,
  AxisName,
  Key,
  PyTree,
  ShapedLike,
  assert_replicated,
  axis_size,
  same_structure,
  shape_string,
  to_varying,
)

# Fewer values are summed together with others.
_LEAST_ALONE = 1 << 16


def widen(codec: Codec, x: Array) -> Array:
  """Returns `x` in the dtype it is encoded in: float32 at least.

  A codec of float32 decodes to it too, so that sums are made before anything
  is rounded; one that keeps the array's dtype gets it as it is.
  """
  if codec.keeps_dtype:
    return x
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def sum_payloads(payloads: list[PyTree], axis_name: AxisName) -> list[PyTree]:
  """Adds summable payloads over workers: floats are summed, words equal.

  Args:
    payloads: of several arrays, in the order of the tree.
    axis_name: the workers' axis.
  """
  leaves, treedef = jax.tree.flatten(to_varying(payloads, axis_name))
  large: list[int] = []
  small: dict[Any, list[int]] = {}
  pair = axis_size(axis_name) == 2
  for i, leaf in enumerate(leaves):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      leaves[i] = assert_replicated(leaf, axis_name)
    elif pair and leaf.size < _LEAST_ALONE:
      small.setdefault(leaf.dtype, []).append(i)
    else:
      large.append(i)
  # Each operand of an all-reduce costs round trips of its own on gloo. Between
  # more workers the order of a sum depends on the place in the operand, and
  # nobody's bits may depend on what else is exchanged.
  joined = [
    jnp.concatenate([leaves[i].reshape(-1) for i in members])
    for members in small.values()
  ]

  def move(arrays: Sequence[Array]) -> list[Array]:
    return [lax.psum(a, axis_name) for a in arrays]

  late, early = halves([leaves[i] for i in large])
  if late:
    rest, first, _ = in_turns(move, [*late, *joined], early)
    totals = [*rest[: len(late)], *first, *rest[len(late) :]]
  else:
    totals = move([*early, *joined])
  for i, total in zip(large, totals, strict=False):
    leaves[i] = total
  for members, total in zip(small.values(), totals[len(large) :], strict=True):
    start = 0
    for i in members:
      shape, size = leaves[i].shape, leaves[i].size
      leaves[i] = total[start : start + size].reshape(shape)
      start += size
  return jax.tree.unflatten(treedef, leaves)


def fold_rows(key: Key | None, rows: int) -> Key | None:
  """Returns a key for each row, stacked."""
  return None if key is None else jax.vmap(key.fold)(jnp.arange(rows))


def encode_rows(
  codec: Codec, rows: Array, state: PyTree, key: Key | None
) -> tuple[PyTree, PyTree]:
  """Encodes each row by itself; payload, state and key have a row axis."""
  return jax.vmap(codec.encode)(rows, state, fold_rows(key, rows.shape[0]))


def init_rows(codec: Codec, rows: int, like: ShapedLike) -> PyTree:
  """Returns the state of `encode_rows` for rows of this shape."""
  return jax.tree.map(
    lambda a: jnp.broadcast_to(a[None], (rows, *a.shape)), codec.init(like)
  )


def check_state(
  expected: PyTree, state: PyTree | None, other: PyTree = None
) -> PyTree:
  """Returns the state to use; raises unless it is of the expected shapes.

  Args:
    expected: shapes of the codec's fresh state for this input.
    state: what the caller gave; None will do for a codec without state.
    other: shapes that will do as well, if any.
  """
  if not jax.tree.leaves((expected, state)):
    return expected
  if state is None:
    raise ValueError(
      "`state` must be given for a codec that has one (make it with the "
      "collective's `..._init`), got None."
    )
  if not (_alike(state, expected) or _alike(state, other)):
    raise ValueError(
      "`state` must be made for this codec, tree and number of workers: "
      f"expected {_shapes(expected)}, got {_shapes(state)}."
    )
  return state


def _alike(state: PyTree, expected: PyTree) -> bool:
  return same_structure(state, expected) and all(
    a.shape == b.shape and a.dtype == b.dtype
    for a, b in zip(
      jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
    )
  )


def _shapes(tree: PyTree) -> str:
  leaves = jax.tree.leaves(tree)
  return ", ".join(map(shape_string, leaves)) if leaves else "no arrays"


def straight_through(
  stock: Callable[[PyTree], PyTree], x: PyTree, y: PyTree
) -> PyTree:
  """Returns `y` with the gradient that `stock(x)` would have.

  Args:
    stock: a linear function: the uncompressed collective.
    x: its argument.
    y: the compressed result, computed from `stop_gradient(x)`.
  """
  transpose = jax.linear_transpose(stock, x)

  @jax.custom_vjp
  def through(x: PyTree, y: PyTree) -> PyTree:
    del x
    return y

  def forward(x: PyTree, y: PyTree) -> tuple[PyTree, None]:
    del x
    return y, None

  def backward(_: None, ct: PyTree) -> tuple[PyTree, PyTree]:
    (x_ct,) = transpose(ct)
    return x_ct, jax.tree.map(jnp.zeros_like, ct)

  through.defvjp(forward, backward)
  return through(x, y)


def check_rows(name: str, x: Array, axis: int, axis_name: AxisName) -> int:
  """Returns the axis as a non-negative int; raises unless workers divide it."""
  workers = axis_size(axis_name)
  if not -x.ndim <= axis < x.ndim:
    raise ValueError(
      f"`{name}` must be an axis of `x`, got {axis} for {shape_string(x)}."
    )
  if x.shape[axis] % workers:
    raise ValueError(
      f"`{name}` must be an axis whose length {workers} workers divide, "
      f"got {axis} of {shape_string(x)}."
    )
  return axis % x.ndim


def to_rows(x: Array, axis: int, workers: int) -> Array:
  """Cuts `x` along an axis into equal rows: (workers, ...)."""
  return jnp.stack(jnp.split(x, workers, axis))


def codec_for_array(codec: Codec) -> Codec:
  """Raises unless the codec encodes arrays."""
  if not isinstance(codec, Codec) or codec.is_tree:
    raise TypeError(f"`codec` must be a codec of arrays, got {codec!r}.")
  return codec


def cut_rows(x: Array, workers: int) -> Array:
  """Cuts `x`, padded with zeros, into a row for each worker."""
  row = row_like(x, workers)
  flat = x.reshape(-1)
  padding = math.prod(row.shape) * workers - flat.size
  return jnp.pad(flat, (0, padding)).reshape(workers, *row.shape)


def weigh(x: PyTree, weight: Any, axis_name: AxisName, op: str) -> PyTree:
  """Returns `x` times this worker's share, before a mean or a sum."""
  if jnp.ndim(weight) != 0:
    raise ValueError(
      f"`weight` must be a scalar, got an array of shape {jnp.shape(weight)}."
    )
  w = to_varying(jnp.asarray(weight, jnp.float32), axis_name)
  if op == "mean":
    total = lax.psum(w, axis_name)
    # The stock mean divides by the number of workers.
    w = jnp.where(total > 0, w * axis_size(axis_name) / total, 0.0)
  return jax.tree.map(lambda a: a * w.astype(a.dtype), x)
