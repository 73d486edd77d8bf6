"""A worker's own part of a step: as many microbatches as it was given."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import (
  Array,
  AxisName,
  PyTree,
  check_float,
  same_structure,
  shape_string,
  to_varying,
)


class Sums(NamedTuple):
  """What a worker has added up over its microbatches.

  Attributes:
    grads: gradients of the losses' sum, float32 at least.
    total: float32[], sum of the losses.
    count: float32[], of what they are the losses: examples or tokens.
    stats: sum of count times statistics, float32 at least.
  """

  grads: PyTree
  total: Array
  count: Array  # type: ignore[assignment]  # Hides tuple.count on purpose.
  stats: PyTree


def accumulate(
  loss_fn: Callable[..., Any],
  axis_name: AxisName,
  params: PyTree,
  stats: PyTree,
  batch: PyTree,
  trips: Array,
) -> Sums:
  """Adds up the first `trips` microbatches. Sends nothing.

  Args:
    loss_fn: (params, stats, microbatch) -> (total, count, stats), or without
      both stats if these are None.
    axis_name: the workers' axis.
    params: of the model.
    stats: that every microbatch starts from.
    batch: microbatches along the leading axis.
    trips: int32[], how many of them.
  """
  # Varying parameters: their gradients would be summed over workers in the
  # loop's body otherwise, and workers of fewer trips would never join.
  params, stats = to_varying((params, stats), axis_name)

  def loss(
    params: PyTree, microbatch: PyTree
  ) -> tuple[Array, tuple[Array, PyTree]]:
    # Made anew: the variables of a Flax model may be written only by the trace
    # that has made them.
    given = () if stats is None else (jax.tree.map(lambda a: a, stats),)
    total, count, new = _checked(loss_fn(params, *given, microbatch), stats)
    return total, (count, new)

  def body(i: Array, sums: Sums) -> Sums:
    microbatch = jax.tree.map(
      lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), batch
    )
    (total, (count, new)), grads = jax.value_and_grad(loss, has_aux=True)(
      params, microbatch
    )
    weighed = jax.tree.map(lambda a: a * count.astype(_wide(a)), new)
    # What counts for nothing adds nothing, be it not finite.
    return jax.tree.map(
      lambda a, b: jnp.where(count > 0, a + b.astype(a.dtype), a),
      sums,
      Sums(grads, total, count, weighed),
    )

  def zeros(a: Array) -> Array:
    return jnp.zeros(a.shape, _wide(a))

  scalar = jnp.zeros((), jnp.float32)
  start = Sums(
    jax.tree.map(zeros, params), scalar, scalar, jax.tree.map(zeros, stats)
  )
  return lax.fori_loop(0, trips, body, to_varying(start, axis_name))


def _wide(a: Any) -> Any:
  return jnp.promote_types(a.dtype, jnp.float32)


def _checked(result: Any, stats: PyTree) -> tuple[Array, Array, PyTree]:
  """Returns (total, count, stats); raises unless a loss function may."""
  names = ("total", "count") if stats is None else ("total", "count", "stats")
  parts = result if isinstance(result, tuple) else (result,)
  if len(parts) != len(names):
    raise ValueError(
      f"`loss_fn` must return ({', '.join(names)}), got {len(parts)} values."
    )
  total, count, new = jnp.asarray(parts[0]), jnp.asarray(parts[1]), None
  for name, a in (("total", total), ("count", count)):
    if a.shape:
      raise ValueError(
        f"`loss_fn` must return scalars, got {shape_string(a)} as {name}."
      )
  check_float("total", total)
  if stats is not None:
    new = parts[2]
    if not _alike(new, stats):
      raise ValueError(
        "`loss_fn` must return stats of the structure, shapes and dtypes that"
        f" it was given, {jax.tree.map(shape_string, stats)}, got"
        f" {jax.tree.map(shape_string, new)}."
      )
  return total, count.astype(jnp.float32), new


def _alike(a: PyTree, b: PyTree) -> bool:
  return same_structure(a, b) and all(
    shape_string(x) == shape_string(y)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )
