"""Means over workers of what a step computes beside its gradient."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import core
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms.step import _local_work, _model_state


def average_work(
  work: _local_work.LocalWork,
  model: PyTree,
  axis_name: AxisName,
  *,
  model_state: str | None,
  mean_loss: bool,
) -> tuple[PyTree, PyTree]:
  """Returns mean metrics and the new model state of a step, inside of a map."""
  # model: the model state before the step.
  metrics, treedef = jax.tree.flatten(work.metrics)
  averaged = [i for i, m in enumerate(metrics) if _is_averaged(m, mean_loss)]
  own = [metrics[i][0] for i in averaged]
  weight = None if work.weight is None else work.weight[0]
  if model_state == "mean":
    new = _local_work.drop_rows(work.model_state)
    model, means = _average_states(new, model, own, axis_name, weight)
  else:
    model = core.PerWorker(work.model_state) if model_state == "local" else None
    if weight is None:
      means = [lax.pmean(a, axis_name) for a in own]
    else:
      means = _average_joined(own, [0] * len(own), axis_name, weight)
  for i, mean in zip(averaged, means, strict=True):
    metrics[i] = mean
  return jax.tree.unflatten(treedef, metrics), model


def _average_states(
  new: PyTree,
  old: PyTree,
  metrics: Sequence[Array],
  axis_name: AxisName,
  weight: Array | None,
) -> tuple[PyTree, list[Array]]:
  """Returns the model state that all workers share, and mean metrics."""
  # Floating-point leaves become the workers' mean, in one sum with the metrics.
  # Others are equal on all workers: see `check_equal`.
  leaves, treedef = jax.tree.flatten(new)
  old_leaves = jax.tree.leaves(old)
  floats = [i for i, a in enumerate(leaves) if _model_state.is_floating(a)]
  means = _average_joined(
    [*metrics, *(leaves[i] for i in floats)],
    [0] * len(metrics) + [old_leaves[i] for i in floats],
    axis_name,
    weight,
  )
  merged = dict(zip(floats, means[len(metrics) :], strict=True))
  leaves = [
    merged[i] if i in merged else core.assert_replicated(a, axis_name)
    for i, a in enumerate(leaves)
  ]
  return jax.tree.unflatten(treedef, leaves), means[: len(metrics)]


def _average_joined(
  leaves: Sequence[Array],
  defaults: Sequence[Any],
  axis_name: AxisName,
  weight: Array | None,
) -> list[Array]:
  """Returns the means of floating-point arrays, in one sum for each dtype."""
  # The arrays are joined, because every array that is summed costs round trips.
  # They are summed in float32 at least.
  # `weight`: float32[], the worker's weight, or None. A worker of weight 0 adds
  # nothing, even if its arrays are not finite. `defaults` are the means if all
  # weigh nothing.
  members: dict[Any, list[int]] = {}
  for i, a in enumerate(leaves):
    wide = jnp.promote_types(a.dtype, jnp.float32)
    members.setdefault(wide, []).append(i)
  means = list(leaves)
  for wide, group in members.items():
    own = jnp.concatenate([leaves[i].astype(wide).reshape(-1) for i in group])
    if weight is None:
      joined = lax.pmean(own, axis_name)
    else:
      w = weight.astype(wide)
      own = jnp.where(w == 0, 0, own * w)
      joined = lax.psum(jnp.append(own, w), axis_name)
      total = joined[-1]
      joined = joined / jnp.where(total == 0, 1, total)
    start = 0
    for i in group:
      shape, dtype = leaves[i].shape, leaves[i].dtype
      stop = start + math.prod(shape)
      means[i] = joined[start:stop].reshape(shape).astype(dtype)
      if weight is not None:
        means[i] = jnp.where(total == 0, defaults[i], means[i])
      start = stop
  return means


def find_metric_specs(
  metrics: PyTree, axis_name: AxisName, mean_loss: bool
) -> PyTree:
  """Returns the partition specs of metrics that `average_work` returns."""
  return jax.tree.map(
    lambda m: P() if _is_averaged(m, mean_loss) else P(axis_name), metrics
  )


def _is_averaged(metric: Array, mean_loss: bool) -> bool:
  """Whether a metric, with its axis of workers, becomes their mean."""
  return mean_loss and metric.ndim == 1 and _model_state.is_floating(metric)
