"""Codec state of a collective: shapes, checks and one state for each row."""

import jax
import jax.numpy as jnp

from jaxmotion.codecs import Codec
from jaxmotion.core import (
  PyTree,
  ShapedLike,
  check_arrays,
  same_structure,
  shape_string,
)


def init_rows(codec: Codec, rows: int, like: ShapedLike) -> PyTree:
  """Returns a fresh codec state for each of several rows, stacked.

  Args:
    codec: codec that encodes each row by itself.
    rows: number of rows.
    like: shape and dtype of one row.
  """
  return jax.tree.map(
    lambda a: jnp.broadcast_to(a[None], (rows, *a.shape)), codec.init(like)
  )


def check_state(
  expected: PyTree, state: PyTree | None, canonical: PyTree = None
) -> PyTree:
  """Returns the state to use; raises unless it has the expected shapes.

  Args:
    expected: shapes of the codec's fresh state for this input.
    state: what the caller gave; None will do for a codec without state.
    canonical: shapes of the canonical state, which is accepted too, if any.
  """
  check_arrays("state", state)
  if not jax.tree.leaves((expected, state)):
    return expected
  if state is None:
    raise ValueError(
      "`state` must be given for a codec that has one (make it with the "
      "collective's `..._init`), got None."
    )
  if not (_same_shapes(state, expected) or _same_shapes(state, canonical)):
    raise ValueError(
      "`state` must be made for this codec, tree and number of workers: "
      f"expected {_shape_strings(expected)}, got {_shape_strings(state)}."
    )
  return state


def _same_shapes(state: PyTree, expected: PyTree) -> bool:
  return same_structure(state, expected) and all(
    jnp.shape(a) == b.shape and jnp.result_type(a) == b.dtype
    for a, b in zip(
      jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
    )
  )


def _shape_strings(tree: PyTree) -> str:
  likes = [
    jax.ShapeDtypeStruct(jnp.shape(a), jnp.result_type(a))
    for a in jax.tree.leaves(tree)
  ]
  return ", ".join(map(shape_string, likes)) if likes else "no arrays"
