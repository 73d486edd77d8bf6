"""Work of one worker by itself: its loss, gradient and model state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms._step import _results
from jaxmotion.transforms._step._results import LocalWork, LossOptions


def make_local_work(options: LossOptions) -> Callable[..., LocalWork]:
  """Makes the function that computes one worker's loss and mean gradient."""
  # It takes (params, model_state, batch, key, trips). `trips`: int32[], number
  # of microbatches that this worker computes, the first ones; None: all.
  weight_fn, microbatches = options.weight_fn, options.microbatches
  value_and_grad = jax.value_and_grad(make_own_loss(options), has_aux=True)

  def compute_part(
    params: PyTree, model_state: PyTree, batch: PyTree, key: Array | None
  ) -> LocalWork:
    """Computes the gradient and the weight of one microbatch."""
    (loss, (new, aux)), grads = value_and_grad(params, model_state, batch, key)
    metrics = (loss, aux) if options.has_aux else loss
    if weight_fn is None:
      return LocalWork(metrics, new, grads, None)
    weight = compute_weight(weight_fn, batch)
    # The mean over no tokens is not finite, nor is its gradient. A weight of
    # 0 adds nothing.
    grads = jax.tree.map(lambda g: jnp.where(weight == 0, 0, g), grads)
    new = keep_unweighted(weight, new, model_state)
    return LocalWork(metrics, new, grads, weight)

  def compute_work(
    params: PyTree, model_state: PyTree, batch: PyTree, key: Any, trips: Any
  ) -> LocalWork:
    """Computes the mean gradient of the worker's microbatches."""
    if microbatches == 1 and trips is None:
      return compute_part(params, model_state, batch, key)
    parts = split_batch(batch, microbatches)

    def compute_one(i: Array, part: PyTree, model_state: PyTree) -> LocalWork:
      own_key = None if key is None else jax.random.fold_in(key, i)
      return compute_part(params, model_state, part, own_key)

    inputs = compute_one, params, model_state, parts, microbatches
    if trips is None:
      return _accumulate_all(*inputs)
    return _accumulate_some(*inputs, trips)

  return compute_work


def _accumulate_all(
  compute_one: Callable[..., LocalWork],
  params: PyTree,
  model_state: PyTree,
  parts: PyTree,
  microbatches: int,
) -> LocalWork:
  """Accumulates all microbatches, each from the model state of the last."""

  def add_microbatch(carry: PyTree, one: PyTree) -> tuple[PyTree, PyTree]:
    (sums, model_state), (i, part) = carry, one
    work = compute_one(i, part, model_state)
    factor = 1 / microbatches if work.weight is None else work.weight
    sums = _add_weighted(sums, work.grads, factor)
    return (sums, work.model_state), (work.metrics, work.weight)

  (sums, model_state), (metrics, weights) = lax.scan(
    add_microbatch,
    (make_sums(params), model_state),
    (jnp.arange(microbatches), parts),
  )
  weight = None if weights is None else weights.sum()
  grads = _divide_sums(sums, params, 1 if weight is None else weight)
  metrics = average_scalars(metrics, weights)
  return LocalWork(metrics, model_state, grads, weight)


def _accumulate_some(
  compute_one: Callable[..., LocalWork],
  params: PyTree,
  model_state: PyTree,
  parts: PyTree,
  microbatches: int,
  trips: Array,
) -> LocalWork:
  """Accumulates the first `trips` microbatches, for unequal workers."""
  # So the result does not depend on which worker computes which microbatch.

  def compute_at(i: Array) -> LocalWork:
    pick = lambda a: lax.dynamic_index_in_dim(a, i, keepdims=False)
    return compute_one(i, jax.tree.map(pick, parts), model_state)

  def add_microbatch(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Adds the gradient, model state and metrics of microbatch `i`."""
    sums, states, metrics, weights = carry
    work = compute_at(i)
    return (
      _add_weighted(sums, work.grads, work.weight),
      _add_weighted(states, work.model_state, work.weight),
      jax.tree.map(lambda a, x: a.at[i].set(x), metrics, work.metrics),
      weights.at[i].set(work.weight),
    )

  metrics = jax.tree.map(
    lambda a: jnp.zeros((microbatches, *a.shape), a.dtype),
    jax.eval_shape(compute_at, jnp.int32(0)).metrics,
  )
  weights = jnp.zeros(microbatches, jnp.float32)
  start = make_sums(params), make_sums(model_state), metrics, weights
  # Its map must not check what varies over workers (`check_vma=False`). Else
  # JAX would sum gradients over workers in the loop's body, and workers with
  # fewer microbatches would never join that sum.
  sums, states, metrics, weights = lax.fori_loop(
    0, trips, add_microbatch, start
  )
  weight = weights.sum()
  new = _divide_sums(states, model_state, weight)
  return LocalWork(
    average_scalars(metrics, weights),
    keep_unweighted(weight, new, model_state),
    _divide_sums(sums, params, weight),
    weight,
  )


def make_sums(tree: PyTree) -> PyTree:
  """Returns zeros of the arrays' shapes and shardings, in float32 at least."""
  return jax.tree.map(
    lambda a: jnp.zeros_like(a, jnp.promote_types(a.dtype, jnp.float32)), tree
  )


def _add_weighted(sums: PyTree, tree: PyTree, weight: Any) -> PyTree:
  return jax.tree.map(lambda s, x: s + x.astype(s.dtype) * weight, sums, tree)


def _divide_sums(sums: PyTree, like: PyTree, weight: Any) -> PyTree:
  """Returns the mean, in the dtypes of `like`; zeros for a weight of 0."""
  divisor = jnp.where(weight == 0, 1, weight)
  return jax.tree.map(lambda s, a: (s / divisor).astype(a.dtype), sums, like)


def make_own_loss(options: LossOptions) -> Callable[..., tuple[Array, PyTree]]:
  """Wraps `loss_fn` as one that returns (loss, (model state, aux))."""
  loss_fn, has_aux = options.loss_fn, options.has_aux

  def compute_loss(
    params: PyTree, model_state: PyTree, batch: PyTree, key: Array | None
  ) -> tuple[Array, PyTree]:
    """Returns the loss and (model state, auxiliary values), or raises."""
    kwargs = {} if key is None else {"key": key}
    if options.model_state is None:
      result = loss_fn(params, batch, **kwargs)
      loss, aux = _split_pair(result, "aux") if has_aux else (result, None)
      return _check_loss(loss), (None, aux)
    # A copy: only the trace that made the variables of a Flax model may write
    # to them.
    given = jax.tree.map(lambda a: a, model_state)
    loss, rest = _split_pair(
      loss_fn(params, given, batch, **kwargs),
      "(model_state, aux)" if has_aux else "model_state",
    )
    new, aux = rest, None
    if has_aux:
      new, aux = _split_pair(rest, "aux", "model_state")
    new = _results.check_same_shapes(new, model_state)
    return _check_loss(loss), (new, aux)

  return compute_loss


def _check_loss(loss: Any) -> Any:
  """Returns the loss of `loss_fn`; raises unless it is a real scalar."""
  leaves = jax.tree.leaves(loss)
  if core.is_array(loss) and not jnp.shape(loss):
    if jnp.issubdtype(jnp.result_type(loss), jnp.floating):
      return loss
  known = leaves and all(map(core.is_array, leaves))
  found = core.shape_strings(loss) if known else f"{loss!r:.200}"
  hint = "average over the examples"
  if isinstance(loss, tuple):
    hint = "with `has_aux=True` it returns (loss, aux)"
  raise ValueError(
    f"`loss_fn` must return a floating-point scalar, got {found}: {hint}."
  )


def compute_weight(weight_fn: Callable[..., Any], batch: PyTree) -> Array:
  """Returns a worker's weight as float32[]; raises unless it is a scalar."""
  weight = weight_fn(batch)
  shaped = hasattr(weight, "shape") and hasattr(weight, "dtype")
  if shaped:
    kinds = (jnp.floating, jnp.integer)
    is_real = any(jnp.issubdtype(weight.dtype, kind) for kind in kinds)
    is_scalar = is_real and not weight.shape
  else:
    is_scalar = type(weight) in (int, float)
  if not is_scalar:
    found = f"{weight.dtype}{list(weight.shape)}" if shaped else repr(weight)
    raise TypeError(f"`weight_fn` must return a real scalar, got {found}.")
  return jnp.asarray(weight, jnp.float32)


def keep_unweighted(weight: Array, new: PyTree, old: PyTree) -> PyTree:
  """Keeps the old model state where the weight of a batch is zero."""
  # `weight`: float32[], the worker's weight.
  return jax.tree.map(
    lambda a, b: jnp.where(weight == 0, b, a) if _results.is_floating(a) else a,
    new,
    old,
  )


def split_batch(batch: PyTree, microbatches: int) -> PyTree:
  """Returns a worker's batch with a leading axis of microbatches."""

  def split_leaf(a: Array) -> Array:
    if not jnp.ndim(a):
      return jnp.broadcast_to(a, (microbatches,))
    return a.reshape(microbatches, -1, *a.shape[1:])

  return jax.tree.map(split_leaf, batch)


def average_scalars(metrics: PyTree, weights: Array | None) -> PyTree:
  """Returns metrics whose floating-point scalars are means of microbatches."""

  def average_leaf(metric: Array) -> Array:
    """Returns the mean over microbatches of a scalar's values."""
    if metric.ndim != 1 or not _results.is_floating(metric):
      return metric
    values = metric.astype(jnp.promote_types(metric.dtype, jnp.float32))
    if weights is None:
      return values.mean().astype(metric.dtype)
    total = weights.sum()
    values = jnp.where(weights == 0, 0, values * weights)
    mean = values.sum() / jnp.where(total == 0, 1, total)
    return mean.astype(metric.dtype)

  return jax.tree.map(average_leaf, metrics)


def _split_pair(
  result: Any, second: str, first: str = "loss"
) -> tuple[Any, Any]:
  """Returns both values of a pair that `loss_fn` returned, or raises."""
  if not isinstance(result, tuple) or len(result) != 2:
    found = (
      f"{len(result)} values" if isinstance(result, tuple) else type(result)
    )
    raise ValueError(f"`loss_fn` must return ({first}, {second}), got {found}.")
  return result
