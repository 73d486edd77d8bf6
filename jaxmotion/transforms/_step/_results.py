"""Options of a loss, and results of workers in a step: means, model states."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxmotion import core, program
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _states


class LocalWork(NamedTuple):
  """Results of one worker before anything is exchanged."""

  metrics: PyTree  # The loss, or (loss, aux).
  model_state: PyTree  # That after the batch, or None.
  grads: PyTree
  weight: Array | None  # float32[], the worker's weight in the mean.


class LossOptions(NamedTuple):
  """Loss function of a training step, and what a step makes of its results."""

  loss_fn: Callable[..., Any]
  has_aux: bool
  model_state: str | None  # "mean", "local" or None.
  weight_fn: Callable[..., Any] | None  # batch -> the worker's weight.
  microbatches: int  # Number of parts of a worker's batch.
  mean_loss: bool  # Whether the loss becomes the workers' mean.

  def get_loss(self, metrics: PyTree) -> Any:
    """Returns the loss among the metrics of a step."""
    return metrics[0] if self.has_aux else metrics


def add_rows(tree: PyTree) -> PyTree:
  """Gives one worker's arrays a leading axis of workers; `PerWorker` has it."""
  return _map_unmarked(lambda x: jnp.expand_dims(x, 0), tree)


def drop_rows(tree: PyTree) -> PyTree:
  """Takes away the leading axis that `add_rows` gave."""
  return _map_unmarked(lambda x: jnp.squeeze(x, 0), tree)


def _map_unmarked(fun: Callable[[Array], Array], tree: PyTree) -> PyTree:
  is_marked = lambda x: isinstance(x, core.PerWorker)
  return jax.tree.map(
    lambda x: x if is_marked(x) else fun(x), tree, is_leaf=is_marked
  )


def average_work(
  work: LocalWork, model: PyTree, axis_name: AxisName, loss: LossOptions
) -> tuple[PyTree, PyTree]:
  """Averages metrics and model state over workers, with few collectives."""
  # model: the model state before the step.
  metrics, treedef = jax.tree.flatten(work.metrics)
  averaged = [
    i for i, m in enumerate(metrics) if is_averaged(m, loss.mean_loss)
  ]
  own = [metrics[i][0] for i in averaged]
  weight = None if work.weight is None else work.weight[0]
  if loss.model_state == "mean":
    # Floating-point leaves become the workers' mean, in one sum with the
    # metrics. Others are equal on all workers: see `check_equal`.
    new, model_tree = jax.tree.flatten(drop_rows(work.model_state))
    old = jax.tree.leaves(model)
    floats = [i for i, a in enumerate(new) if is_floating(a)]
    means = _average_joined(
      [*own, *(new[i] for i in floats)],
      [0] * len(own) + [old[i] for i in floats],
      axis_name,
      weight,
    )
    merged = dict(zip(floats, means[len(own) :], strict=True))
    new = [
      merged[i] if i in merged else core.assert_replicated(a, axis_name)
      for i, a in enumerate(new)
    ]
    model = jax.tree.unflatten(model_tree, new)
  else:
    keeps_own = loss.model_state == "local"
    model = core.PerWorker(work.model_state) if keeps_own else None
    if weight is None:
      means = [lax.pmean(a, axis_name) for a in own]
    else:
      means = _average_joined(own, [0] * len(own), axis_name, weight)
  for i, mean in zip(averaged, means[: len(own)], strict=True):
    metrics[i] = mean
  return jax.tree.unflatten(treedef, metrics), model


def _average_joined(
  leaves: Sequence[Array],
  defaults: Sequence[Any],
  axis_name: AxisName,
  weight: Array | None,
) -> list[Array]:
  """Averages floating-point arrays over workers, in one sum for each dtype."""
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
    own, unravel = ravel_pytree([leaves[i].astype(wide) for i in group])
    if weight is None:
      joined = lax.pmean(own, axis_name)
    else:
      w = weight.astype(wide)
      own = jnp.where(w == 0, 0, own * w)
      summed = lax.psum(jnp.append(own, w), axis_name)
      total = summed[-1]
      joined = summed[:-1] / jnp.where(total == 0, 1, total)
    for i, mean in zip(group, unravel(joined), strict=True):
      means[i] = mean.astype(leaves[i].dtype)
      if weight is not None:
        means[i] = jnp.where(total == 0, defaults[i], means[i])
  return means


def is_averaged(metric: Array, mean_loss: bool) -> bool:
  """Returns whether a metric, with an axis of workers, becomes their mean."""
  return mean_loss and metric.ndim == 1 and is_floating(metric)


def is_floating(a: Array) -> bool:
  """Returns whether an array holds floating-point elements."""
  return jnp.issubdtype(a.dtype, jnp.floating)


def check_same_shapes(new: PyTree, old: PyTree) -> PyTree:
  """Returns the arrays of a new model state; raises unless it fits the old."""
  message = (
    "`loss_fn` must return a model state of the structure, shapes and dtypes "
    "that it was given, "
  )
  if not core.same_structure(new, old):
    raise ValueError(
      f"{message}{jax.tree.structure(old)}, got {jax.tree.structure(new)}."
    )
  new = jax.tree.map(jnp.asarray, new)
  for (path, a), b in zip(
    core.named_leaves(new), jax.tree.leaves(old), strict=True
  ):
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      place = f" at {path!r}" if path else ""
      raise ValueError(
        f"{message}{core.shape_string(b)}, got {core.shape_string(a)}{place}."
      )
  return new


def check_equal(
  compute_state: Callable[[PyTree, PyTree], PyTree],
  replicated: PyTree,
  own: PyTree,
  axis_name: AxisName,
) -> None:
  """Raises for a model state of integers that differs between workers."""
  # They are equal if they are computed without the worker's own arguments.
  if all(map(is_floating, jax.tree.leaves(replicated))):
    return
  jaxpr, shapes = jax.make_jaxpr(compute_state, return_shape=True)(
    replicated, own
  )
  axes = frozenset(core.axis_names(axis_name))
  varying = [frozenset()] * len(jax.tree.leaves(replicated)) + [axes] * len(
    jax.tree.leaves(own)
  )
  differs = program.find_varying(jaxpr, varying, axes)
  for (path, like), over in zip(
    core.named_leaves(shapes), differs, strict=True
  ):
    if over and not is_floating(like):
      raise ValueError(
        f"`model_state{'/' * bool(path)}{path}` must not depend on the batch "
        f"or the key, because {core.shape_string(like)} has no mean over "
        "workers. Make it floating-point, or keep each worker's own: "
        "model_state='local'."
      )


def keep_finite(new: Array, old: Array) -> Array:
  """Returns the new array, or the old one if the new one is not finite."""
  if not is_floating(new):
    return new
  return jnp.where(jnp.isfinite(new).all(), new, old)


def keep_if_skipped(
  new: PyTree, old: PyTree, old_opt_state: PyTree, opt_state: PyTree
) -> PyTree:
  """Keeps the old floating-point model state if the update was skipped."""
  # What made a gradient not finite made statistics so too. A delayed gradient
  # is skipped one step later, so its statistics are looked at themselves.
  if core.find_nodes(opt_state, _states.DelayedState):
    return jax.tree.map(keep_finite, new, old)
  before = _states.list_skipped(old_opt_state)
  after = _states.list_skipped(opt_state)
  if not after:
    return new
  skipped = jnp.stack(after).sum() > jnp.stack(before).sum()
  return jax.tree.map(
    lambda a, b: jnp.where(skipped, b, a) if is_floating(a) else a, new, old
  )
