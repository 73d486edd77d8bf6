"""Work of one worker of a fully sharded step: its loss and its gradient."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import collectives, core, program
from jaxmotion.collectives.extend import apply_nonfinite_policy, apply_weight
from jaxmotion.core import Array, PyTree
from jaxmotion.transforms.parts import _fully_sharded_plan, _weight_part
from jaxmotion.transforms.step import _local_work


def make_sharded_work(
  loss: _local_work.LossOptions,
  plan: _fully_sharded_plan.ShardPlan,
) -> Callable[..., _local_work.LocalWork]:
  """Makes the function that computes one worker's part of the gradient."""
  own_loss = _local_work.make_own_loss(loss)
  weight_fn, microbatches = loss.weight_fn, loss.microbatches

  def find_weights(batches: PyTree) -> tuple[Array | None, Array | None]:
    """Returns the microbatches' weights, and their shares of the mean."""
    if weight_fn is None:
      return None, None
    weights = lax.map(
      lambda batch: _local_work.compute_weight(weight_fn, batch), batches
    )
    if plan.options.nonfinite == "zero":
      weights, _ = apply_nonfinite_policy("zero", weights, plan.axes)
    mean = weights.mean()
    own = weights / jnp.where(mean == 0, 1, mean)
    shares = apply_weight(own, mean, plan.axes, "mean")
    # A weight of 0 is no share, whatever the mean is.
    return weights, jnp.where(weights == 0, 0, shares)

  def compute_work(
    own: tuple[PyTree, Array, core.PerWorker],
    model_state: PyTree,
    batch: PyTree,
    key: Array | None,
    trips: None,
  ) -> _local_work.LocalWork:
    # The gradient is (grads, errors, flags): the mean's part of leaves that are
    # cut and the worker's own of others; new error memory; and for each leaf
    # NaN if this worker's gradient was not finite.
    assert trips is None  # `check_step` refuses counts.
    parts, count, memory = own
    errors = core.unpack_worker(memory)
    batches = _local_work.split_batch(batch, microbatches)
    weights, shares = find_weights(batches)

    def compute_part(
      carry: tuple[PyTree, PyTree, list[Array]], one: tuple[Any, ...]
    ) -> tuple[tuple[PyTree, PyTree, list[Array]], tuple[PyTree, list[Array]]]:
      """Adds the gradient of a microbatch to the sums."""
      (sums, model_state, errors), (i, batch, weight, share) = carry, one
      keys = plan.leaf_keys(count * microbatches + i)
      own_key = key
      if key is not None and microbatches > 1:
        own_key = jax.random.fold_in(key, i)

      def loss_of(
        parts: PyTree, errors: list[Array], flags: list[Array]
      ) -> tuple[Array, tuple[PyTree, PyTree]]:
        params = plan.wrap_parts(parts, errors, flags, share, keys)
        return own_loss(params, model_state, batch, own_key)

      inputs = parts, errors, plan.make_flags()
      value_and_grad = jax.value_and_grad(
        _trace_gathered(loss_of, inputs, plan), argnums=(0, 1, 2), has_aux=True
      )
      (value, (new, aux)), (grads, changes, flags) = value_and_grad(*inputs)
      if weight is not None:
        new = _local_work.keep_unweighted(weight, new, model_state)
      errors = jax.tree.map(jnp.add, errors, changes)
      if microbatches > 1:
        grads = jax.tree.map(
          lambda s, g: s + g.astype(s.dtype) / microbatches, sums, grads
        )
      metrics = (value, aux) if loss.has_aux else value
      return (grads, new, errors), (metrics, flags)

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
    found = grads, errors, flags
    return _local_work.LocalWork(metrics, model_state, found, weight)

  return compute_work


def _trace_gathered(
  loss_of: Callable[..., Any],
  inputs: tuple[PyTree, list[Array], list[Array]],
  plan: _fully_sharded_plan.ShardPlan,
) -> Callable[..., Any]:
  """Returns the traced loss; raises if it depends on a part by itself."""
  # Such a loss would differ between workers, and nothing would average its
  # gradient. The caller's function may be slow to trace, so it runs once: its
  # jaxpr is checked first and then differentiated.
  closed, shapes = jax.make_jaxpr(loss_of, return_shape=True)(*inputs)
  # Each leaf counts as an axis over which its part differs.
  names = [
    frozenset([("part", leaf.path)] if leaf.cut.is_cut else [])
    for leaf in plan.leaves
  ]
  found, *_ = program.find_varying(
    closed,
    [*names, *[frozenset()] * len(jax.tree.leaves(inputs[1:]))],
    frozenset().union(*names),
    frozenset([_weight_part.GATHERED]),
  )
  if found:
    path = "/".join(filter(None, ("params", min(found)[1])))
    raise ValueError(
      f"`loss_fn` must gather `{path}` before it computes with it, got a loss "
      "of this worker's part alone: call `gather_params` first."
    )
  run = core.jax_core.jaxpr_as_fun(closed)

  def evaluate(*inputs: PyTree) -> Any:
    outs = run(*jax.tree.leaves(inputs))
    return jax.tree.unflatten(jax.tree.structure(shapes), outs)

  return evaluate


def average_whole(plan: _fully_sharded_plan.ShardPlan, grads: PyTree) -> PyTree:
  """Returns gradients of which those of whole leaves are the workers' mean."""
  leaves = jax.tree.leaves(grads)
  treedef: Any = jax.tree.structure(grads)
  whole = [i for i, cut in enumerate(plan.cuts) if not cut.is_cut]
  if whole:
    own = [leaves[i] for i in whole]
    if isinstance(plan.axis_name, core.HostAxes):
      means, _ = collectives.all_reduce_hierarchical(own, plan.axis_name)
    else:
      means, _ = collectives.all_reduce(own, plan.axis_name)
    for i, mean in zip(whole, means, strict=True):
      leaves[i] = plan.model.assert_shared(mean, plan.leaves[i].spec)
  return treedef.unflatten(leaves)


def find_gradient_specs(
  plan: _fully_sharded_plan.ShardPlan, params: PyTree
) -> Any:
  """Returns the partition specs of the gradients of all workers."""
  treedef: Any = jax.tree.structure(params)
  grads = treedef.unflatten([P(plan.axes, *leaf.spec) for leaf in plan.leaves])
  return grads, plan.memory_specs(), P(plan.axes)
