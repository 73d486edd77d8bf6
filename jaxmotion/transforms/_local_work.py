"""Work of one worker by itself: its loss, gradient and model state."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms import _model_state


class LocalWork(NamedTuple):
  """Results of one worker before anything is exchanged.

  Attributes:
    metrics: loss, or (loss, aux).
    model_state: model state after the batch, or None.
    grads: gradient of the worker's own loss.
    weight: float32[], the worker's weight in the mean, or None.
  """

  metrics: PyTree
  model_state: PyTree
  grads: PyTree
  weight: Array | None


def check_loss_options(
  has_aux: Any, model_state: Any, weight_fn: Any, microbatches: Any
) -> None:
  """Raises unless a builder's options for its loss function are valid."""
  core.check_bool("has_aux", has_aux)
  core.check_choice("model_state", model_state, (None, "mean", "local"))
  if weight_fn is not None:
    core.check_callable("weight_fn", weight_fn)
  core.check_int("microbatches", microbatches, 1, 2**31 - 1)


def make_local_work(
  loss_fn: Callable[..., Any],
  *,
  has_aux: bool,
  stateful: bool,
  weight_fn: Callable[..., Any] | None,
  microbatches: int,
) -> Callable[..., LocalWork]:
  """Makes the function that computes one worker's gradient."""

  compute_loss = make_own_loss(loss_fn, has_aux=has_aux, stateful=stateful)
  value_and_grad = jax.value_and_grad(compute_loss, has_aux=True)

  def compute_work(
    params: PyTree, model_state: PyTree, batch: PyTree, key: Array | None
  ) -> LocalWork:
    (loss, (new, aux)), grads = value_and_grad(params, model_state, batch, key)
    metrics = (loss, aux) if has_aux else loss
    if weight_fn is None:
      return LocalWork(metrics, new, grads, None)
    weight = compute_weight(weight_fn, batch)
    # The mean over no tokens is not finite, nor is its gradient. A weight of
    # 0 adds nothing.
    grads = jax.tree.map(lambda g: jnp.where(weight == 0, 0, g), grads)
    new = keep_unweighted(weight, new, model_state)
    return LocalWork(metrics, new, grads, weight)

  if microbatches == 1:
    return compute_work

  def accumulate_work(
    params: PyTree, model_state: PyTree, batch: PyTree, key: Array | None
  ) -> LocalWork:
    def add_microbatch(
      carry: tuple[PyTree, PyTree], microbatch: tuple[Array, PyTree]
    ) -> tuple[tuple[PyTree, PyTree], tuple[PyTree, Array | None]]:
      (sums, model_state), (i, part) = carry, microbatch
      own_key = None if key is None else jax.random.fold_in(key, i)
      work = compute_work(params, model_state, part, own_key)
      share = 1 / microbatches if work.weight is None else work.weight
      sums = jax.tree.map(
        lambda s, g: s + g.astype(s.dtype) * share, sums, work.grads
      )
      return (sums, work.model_state), (work.metrics, work.weight)

    parts = split_batch(batch, microbatches)
    zeros = jax.tree.map(
      lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)),
      params,
    )
    (sums, model_state), (metrics, weights) = lax.scan(
      add_microbatch,
      (zeros, model_state),
      (jnp.arange(microbatches), parts),
    )
    weight = None if weights is None else weights.sum()
    divisor = 1 if weight is None else jnp.where(weight == 0, 1, weight)
    grads = jax.tree.map(
      lambda s, p: (s / divisor).astype(p.dtype), sums, params
    )
    metrics = average_scalars(metrics, weights)
    return LocalWork(metrics, model_state, grads, weight)

  return accumulate_work


def make_own_loss(
  loss_fn: Callable[..., Any], *, has_aux: bool, stateful: bool
) -> Callable[..., tuple[Array, tuple[PyTree, PyTree]]]:
  """Makes a loss of one shape of whatever the caller's loss returns."""

  def compute_loss(
    params: PyTree, model_state: PyTree, batch: PyTree, key: Array | None
  ) -> tuple[Array, tuple[PyTree, PyTree]]:
    kwargs = {} if key is None else {"key": key}
    if not stateful:
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
    new, aux = (
      _split_pair(rest, "aux", "model_state") if has_aux else (rest, None)
    )
    new = _model_state.check_same_shapes(new, model_state)
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
  """Returns a worker's weight as float32[], or raises."""
  return _check_result(weight_fn(batch))


def keep_unweighted(weight: Array, new: PyTree, old: PyTree) -> PyTree:
  """Returns the new model state, or the old one if the batch weighs nothing."""
  # `weight`: float32[], the worker's weight.
  return jax.tree.map(
    lambda a, b: (
      jnp.where(weight == 0, b, a) if _model_state.is_floating(a) else a
    ),
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
  return jax.tree.map(lambda m: _average_scalar(m, weights), metrics)


def _average_scalar(metric: Array, weights: Array | None) -> Array:
  """Returns the mean over microbatches of a floating-point scalar."""
  if metric.ndim != 1 or not _model_state.is_floating(metric):
    return metric
  values = metric.astype(jnp.promote_types(metric.dtype, jnp.float32))
  if weights is None:
    return values.mean().astype(metric.dtype)
  total = weights.sum()
  values = jnp.where(weights == 0, 0, values * weights)
  mean = values.sum() / jnp.where(total == 0, 1, total)
  return mean.astype(metric.dtype)


def _check_result(weight: Any) -> Array:
  """Returns a weight as float32[]; raises unless it is a real scalar."""
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
