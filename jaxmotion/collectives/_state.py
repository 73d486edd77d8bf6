"""Codec state of a collective: shapes, checks and one state for each row."""

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.core import PyTree, ShapedLike


def init_rows(codec: codecs.Codec, rows: int, like: ShapedLike) -> PyTree:
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
  core.check_arrays("state", state)
  if not jax.tree.leaves((expected, state)):
    return expected
  if state is None:
    raise ValueError(
      "`state` must be given for a codec that has one (make it with the "
      "collective's `..._init`), got None."
    )
  if not (
    core.same_shapes(state, expected) or core.same_shapes(state, canonical)
  ):
    raise ValueError(
      "`state` must be made for this codec, tree and number of workers: "
      f"expected {core.shape_strings(expected)}, got "
      f"{core.shape_strings(state)}."
    )
  return state
