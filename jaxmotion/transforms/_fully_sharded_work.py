"""Work of one worker of a fully sharded step: its loss and its gradient."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import collectives, core, program
from jaxmotion.collectives.extend import apply_nonfinite_policy, apply_weight
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import (
  _fully_sharded_plan,
  _local_work,
  _model_axes,
  _shard_layout,
)


class ShardedWork(NamedTuple):
  """Results of one worker before the optimizer runs.

  Attributes:
    local: metrics, model state and weight. Its gradient is the mean's part of
      leaves that are cut, and the worker's own of leaves that are whole.
    errors: new error memory of leaves that are cut.
    flags: for each leaf NaN if this worker's gradient was not finite.
  """

  local: _local_work.LocalWork
  errors: list[Array]
  flags: list[Array]


def make_sharded_work(
  loss_fn: Callable[..., Any],
  plan: _fully_sharded_plan.ShardPlan,
  *,
  has_aux: bool,
  stateful: bool,
  weight_fn: Callable[..., Any] | None,
  microbatches: int,
) -> Callable[..., ShardedWork]:
  """Makes the function that computes one worker's part of the gradient."""
  own_loss = _local_work.make_own_loss(
    loss_fn, has_aux=has_aux, stateful=stateful
  )

  def find_weights(batches: PyTree) -> tuple[Array | None, Array | None]:
    """Returns the microbatches' weights, and their shares of the mean."""
    if weight_fn is None:
      return None, None
    weights = lax.map(
      lambda batch: _local_work.compute_weight(weight_fn, batch), batches
    )
    if plan.nonfinite == "zero":
      weights, _ = apply_nonfinite_policy("zero", weights, plan.axes)
    mean = weights.mean()
    own = weights / jnp.where(mean == 0, 1, mean)
    shares = apply_weight(own, mean, plan.axes, "mean")
    # A weight of 0 is no share, whatever the mean is.
    return weights, jnp.where(weights == 0, 0, shares)

  def compute_work(
    parts: PyTree,
    errors: list[Array],
    count: Array,
    model_state: PyTree,
    batch: PyTree,
    key: Array | None,
    cuts: list[_shard_layout.LeafCut],
  ) -> ShardedWork:
    batches = _local_work.split_batch(batch, microbatches)
    weights, shares = find_weights(batches)

    def compute_part(
      carry: tuple[PyTree, PyTree, list[Array]], one: tuple[Any, ...]
    ) -> tuple[tuple[PyTree, PyTree, list[Array]], tuple[PyTree, list[Array]]]:
      """Adds the gradient of a microbatch to the sums."""
      (sums, model_state, errors), (i, batch, weight, share) = carry, one
      keys = plan.leaf_keys(parts, cuts, count * microbatches + i)
      own_key = key
      if key is not None and microbatches > 1:
        own_key = jax.random.fold_in(key, i)

      def loss_of(
        parts: PyTree, errors: list[Array], flags: list[Array]
      ) -> tuple[Array, tuple[PyTree, PyTree]]:
        params = plan.wrap_parts(parts, errors, flags, share, keys, cuts)
        return own_loss(params, model_state, batch, own_key)

      def probe(parts: PyTree) -> Array:
        params = plan.wrap_parts(
          parts, errors, [], share, keys, cuts, probe=True
        )
        return own_loss(params, model_state, batch, own_key)[0]

      _check_gathered(probe, parts, cuts)
      value_and_grad = jax.value_and_grad(
        loss_of, argnums=(0, 1, 2), has_aux=True
      )
      (loss, (new, aux)), (grads, changes, flags) = value_and_grad(
        parts, errors, plan.make_flags(parts, cuts)
      )
      if weight is not None:
        new = _local_work.keep_unweighted(weight, new, model_state)
      errors = jax.tree.map(jnp.add, errors, changes)
      sums = grads if microbatches == 1 else _add_share(sums, grads)
      metrics = (loss, aux) if has_aux else loss
      return (sums, new, errors), (metrics, flags)

    def _add_share(sums: PyTree, grads: PyTree) -> PyTree:
      return jax.tree.map(
        lambda s, g: s + g.astype(s.dtype) / microbatches, sums, grads
      )

    indices = jnp.arange(microbatches)
    given = (indices, batches, weights, shares)
    if microbatches == 1:
      first = jax.tree.map(lambda a: a[0], given)
      carry = (None, model_state, errors)
      (grads, model_state, errors), (metrics, flags) = compute_part(
        carry, first
      )
    else:
      zeros = jax.tree.map(
        lambda p: jnp.zeros(p.shape, jnp.promote_types(p.dtype, jnp.float32)),
        parts,
      )
      (sums, model_state, errors), (metrics, flags) = lax.scan(
        compute_part, (zeros, model_state, errors), given
      )
      grads = jax.tree.map(lambda s, p: s.astype(p.dtype), sums, parts)
      metrics = _local_work.average_scalars(metrics, weights)
    weight = None if weights is None else weights.sum()
    local = _local_work.LocalWork(metrics, model_state, grads, weight)
    return ShardedWork(local, errors, flags)

  return compute_work


def _check_gathered(
  probe: Callable[[PyTree], Array],
  parts: PyTree,
  cuts: list[_shard_layout.LeafCut],
) -> None:
  """Raises if a loss depends on a part that was not gathered."""
  # Its value would differ between workers, and nothing would average its
  # gradient.
  # Each leaf counts as an axis over which its part differs.
  names = [
    frozenset([("part", path)] if cut.dimension is not None else [])
    for (path, _), cut in zip(core.named_leaves(parts), cuts, strict=True)
  ]
  jaxpr = jax.make_jaxpr(probe)(parts)
  (found,) = program.find_varying(jaxpr, names, frozenset().union(*names))
  if found:
    path = "/".join(filter(None, ("params", min(found)[1])))
    raise ValueError(
      f"`loss_fn` must gather `{path}` before it computes with it, got a loss "
      "of this worker's part alone: call `gather_params` first."
    )


def average_whole(
  grads: PyTree,
  is_cut: list[bool],
  axis_name: AxisName,
  local_axis: AxisName | None,
  model: _model_axes.ModelAxes,
) -> PyTree:
  """Returns gradients of which those of whole leaves are the workers' mean."""
  specs = model.leaf_specs(len(is_cut))
  leaves = jax.tree.leaves(grads)
  treedef: Any = jax.tree.structure(grads)
  whole = [i for i, own in enumerate(is_cut) if not own]
  if whole:
    own = [leaves[i] for i in whole]
    if local_axis is None:
      means, _ = collectives.all_reduce(own, axis_name)
    else:
      means, _ = collectives.all_reduce_hierarchical(own, axis_name, local_axis)
    for i, mean in zip(whole, means, strict=True):
      leaves[i] = model.assert_shared(mean, specs[i])
  return treedef.unflatten(leaves)


def find_work_specs(
  plan: _fully_sharded_plan.ShardPlan,
  params: PyTree,
  cuts: list[_shard_layout.LeafCut],
) -> Any:
  """Returns the partition specs of the work of all workers."""
  treedef: Any = jax.tree.structure(params)
  specs = plan.find_model(params).leaf_specs(len(cuts))
  split = P(plan.axes)
  grads = treedef.unflatten([P(plan.axes, *spec) for spec in specs])
  local: Any = _local_work.LocalWork(split, split, grads, split)  # type: ignore[arg-type]
  memory: Any = plan.memory_specs(params, cuts)
  return ShardedWork(local, memory, split)  # type: ignore[arg-type]
