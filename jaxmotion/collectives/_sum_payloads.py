"""Sums of summable payloads over workers, without decoding them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.collectives import _pieces, _transport
from jaxmotion.core import Array, AxisName, PyTree

# Between two workers, arrays of fewer elements are joined and summed together.
MIN_ELEMENTS_ALONE = 1 << 16


def sum_payloads(payloads: list[PyTree], axis_name: AxisName) -> list[PyTree]:
  """Returns the sums of summable payloads over workers."""
  # Floats are added. Unsigned words (the seed of a shared random sample) are
  # equal on all workers, so they stay as they are. Empty arrays are not sent.
  # A sum is a sum of floats, so its bits depend on the order of its terms. That
  # order must not depend on what else is exchanged in the step. Arrays may be
  # joined into one operand only between two workers, where addition commutes.
  leaves, treedef = jax.tree.flatten(core.to_varying(payloads, axis_name))
  alone: list[int] = []
  joined: dict[Any, list[int]] = {}
  is_pair = core.axis_size(axis_name) == 2
  for i, leaf in enumerate(leaves):
    if not leaf.size or not jnp.issubdtype(leaf.dtype, jnp.floating):
      leaves[i] = core.assert_replicated(leaf, axis_name)
    elif is_pair and leaf.size < MIN_ELEMENTS_ALONE:
      joined.setdefault(leaf.dtype, []).append(i)
    else:
      alone.append(i)
  # Each operand of an all-reduce costs round trips of its own on gloo, so small
  # ones are joined. Between more than two workers the order of a sum depends on
  # the position in the operand.
  buffers = [join_flat(leaves, members) for members in joined.values()]

  def add(arrays: Sequence[Array]) -> list[Array]:
    return [lax.psum(a, axis_name) for a in arrays]

  late, early = _transport.split_in_halves([leaves[i] for i in alone])
  if _pieces.sends_pieces():
    # The last array first, and small ones, of all layers, in the end.
    sums = add([leaves[i] for i in alone[::-1]])
    totals = [*sums[::-1], *add(buffers)]
  elif late:
    late_totals, early_totals, _ = _transport.send_early_first(
      add, [*late, *buffers], early
    )
    split = len(late)
    totals = [*late_totals[:split], *early_totals, *late_totals[split:]]
  else:
    totals = add([*early, *buffers])
  for i, total in zip(alone, totals, strict=False):
    leaves[i] = total
  for members, total in zip(joined.values(), totals[len(alone) :], strict=True):
    split_flat(leaves, members, total)
  return jax.tree.unflatten(treedef, leaves)


def join_flat(leaves: Sequence[Array], members: Sequence[int]) -> Array:
  """Returns some of the leaves, which have one dtype, as one flat array."""
  return jnp.concatenate([leaves[i].reshape(-1) for i in members])


def split_flat(
  leaves: list[Array], members: Sequence[int], joined: Array
) -> None:
  """Puts the parts of an array of `join_flat` where their leaves were."""
  start = 0
  for i in members:
    shape, size = leaves[i].shape, leaves[i].size
    leaves[i] = joined[start : start + size].reshape(shape)
    start += size


def scatter_payload(payload: PyTree, axis_name: AxisName) -> PyTree:
  """Sums a summable payload's rows over workers; each keeps its own row."""
  index = core.worker_index(axis_name)

  def scatter_leaf(a: Array) -> Array:
    if jnp.issubdtype(a.dtype, jnp.floating):
      return lax.psum_scatter(a, axis_name, scatter_dimension=0, tiled=False)
    return lax.dynamic_index_in_dim(a, index, 0, keepdims=False)

  return jax.tree.map(scatter_leaf, payload)
