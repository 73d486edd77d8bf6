"""Gradient accumulation over a worker's own microbatches."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree


class MicrobatchSums(NamedTuple):
  """Sums over the microbatches of one worker.

  Attributes:
    grads: gradients of the sum of the losses, float32 at least.
    total: float32[], sum of the losses.
    count: float32[], number of examples (or tokens) in that sum.
    stats: sum of count times statistics, float32 at least.
  """

  grads: PyTree
  total: Array
  count: Array  # type: ignore[assignment]  # Hides tuple.count on purpose.
  stats: PyTree


def accumulate_microbatches(
  loss_fn: Callable[..., Any],
  params: PyTree,
  stats: PyTree,
  batch: PyTree,
  trips: Array,
) -> MicrobatchSums:
  """Sums losses and gradients over microbatches, without a collective."""
  # Its map must not check what varies over workers (`map_local_work`). Else JAX
  # would sum gradients over workers in the loop's body, and workers with fewer
  # microbatches would never join that sum.
  # `trips`: int32[], number of microbatches to run, the first ones.

  def loss_of_params(
    params: PyTree, microbatch: PyTree
  ) -> tuple[Array, tuple[Array, PyTree]]:
    # A copy: only the trace that made the variables of a Flax model may write
    # to them.
    given = () if stats is None else (jax.tree.map(lambda a: a, stats),)
    total, count, new = _check_result(
      loss_fn(params, *given, microbatch), stats
    )
    return total, (count, new)

  def add_microbatch(i: Array, sums: MicrobatchSums) -> MicrobatchSums:
    microbatch = jax.tree.map(
      lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False), batch
    )
    (total, (count, new)), grads = jax.value_and_grad(
      loss_of_params, has_aux=True
    )(params, microbatch)
    weighted = jax.tree.map(lambda a: a * count.astype(_sum_dtype(a)), new)
    # A microbatch of count 0 adds nothing, even if its loss is not finite. A
    # count of NaN is no count of 0: it reaches every worker.
    return jax.tree.map(
      lambda a, b: jnp.where(count <= 0, a, a + b.astype(a.dtype)),
      sums,
      MicrobatchSums(grads, total, count, weighted),
    )

  def zeros_like(a: Array) -> Array:
    return jnp.zeros_like(a, _sum_dtype(a))  # Of its sharding, too.

  scalar = jnp.zeros((), jnp.float32)
  start = MicrobatchSums(
    jax.tree.map(zeros_like, params),
    scalar,
    scalar,
    jax.tree.map(zeros_like, stats),
  )
  return lax.fori_loop(0, trips, add_microbatch, start)


def _sum_dtype(a: Any) -> Any:
  return jnp.promote_types(a.dtype, jnp.float32)


def _check_result(result: Any, stats: PyTree) -> tuple[Array, Array, PyTree]:
  """Returns (total, count, stats); raises unless `loss_fn` returned them."""
  names = ("total", "count") if stats is None else ("total", "count", "stats")
  values = result if isinstance(result, tuple) else (result,)
  if len(values) != len(names):
    raise ValueError(
      f"`loss_fn` must return ({', '.join(names)}), got {len(values)} values."
    )
  total, count, new = jnp.asarray(values[0]), jnp.asarray(values[1]), None
  for name, a in (("total", total), ("count", count)):
    if a.shape:
      raise ValueError(
        f"`loss_fn` must return scalars, got {core.shape_string(a)} as {name}."
      )
  core.check_float("total", total)
  if stats is not None:
    new = values[2]
    if not _same_shapes(new, stats):
      raise ValueError(
        "`loss_fn` must return stats of the structure, shapes and dtypes that"
        f" it was given, {jax.tree.map(core.shape_string, stats)}, got"
        f" {jax.tree.map(core.shape_string, new)}."
      )
  return total, count.astype(jnp.float32), new


def _same_shapes(a: PyTree, b: PyTree) -> bool:
  return core.same_structure(a, b) and all(
    core.shape_string(x) == core.shape_string(y)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )
