"""Optimizer that applies each gradient one step late."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree
from jaxmotion.transforms import _exchange, _placement


def delayed(
  tx: optax.GradientTransformation | optax.MultiSteps,
  *,
  axis_name: AxisName = "data",
  is_weighted: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Applies each gradient one step late, while the next one is computed.

  The gradient of a step waits in the state. The next step exchanges and applies
  it, beside the computation of its own gradient at the parameters of before.
  Exchange and computation then take the longer of their times, not the sum.
  Stale gradients may need a lower learning rate. The first step applies zeros,
  and the last gradient is not applied.

  Args:
    tx: optax chain with an `exchange` over `axis_name`.
    axis_name: the workers' axis, or a tuple of axes.
    is_weighted: whether updates get `weight=`, as from a `weight_fn`. The
      weight waits with its gradient.

  Returns:
    An optax transformation whose state is a `DelayedState`. Its update takes
    this worker's own gradient.

  Raises:
    TypeError: an argument of another type.
    ValueError: an update gets `weight=` without `is_weighted`, or none with it.

  Example:
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> chain = optax.chain(transforms.exchange("data"), optax.sgd(0.5))
    >>> init, step = transforms.make_train_step(
    ...   lambda w, x: jnp.mean((x - w) ** 2), delayed(chain), mesh
    ... )
    >>> state, found = init(jnp.zeros(())), []
    >>> for _ in range(3):
    ...   state, loss = step(state, jnp.ones(4))
    ...   found.append(float(state.params))
    >>> found
    [0.0, 1.0, 2.0]
  """
  chain = optax.with_extra_args_support(_placement.as_transformation(tx))
  axis_name = core.flatten_axes("axis_name", axis_name)
  core.check_bool("is_weighted", is_weighted)

  def init(params: PyTree) -> _exchange.DelayedState:
    core.check_arrays("params", params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    weight = jnp.zeros((), jnp.float32) if is_weighted else None
    pending = core.to_varying((zeros, weight), axis_name)
    return _exchange.DelayedState(
      jnp.zeros((), jnp.int32), chain.init(params), core.pack_worker(pending)
    )

  def update(
    grads: PyTree, state: Any, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, _exchange.DelayedState]:
    core.check_arrays("grads", grads)
    core.check_arrays("params", params)
    core.check_instance(
      "state", state, _exchange.DelayedState, "what `init` returned"
    )
    # The loss is that of the next gradient.
    extra_args.pop("value", None)
    own_weight = extra_args.pop("weight", None)
    if (own_weight is not None) != is_weighted:
      raise ValueError(
        f"`is_weighted` must be {not is_weighted} of `delayed`, whose update "
        f"{'got no' if is_weighted else 'gets a'} `weight`, got {is_weighted}."
      )
    pending, weight = core.unpack_worker(state.pending)
    if weight is not None:
      extra_args["weight"] = weight
    updates, inner = chain.update(pending, state.inner, params, **extra_args)
    waiting = core.to_varying((grads, own_weight), axis_name)
    return updates, _exchange.DelayedState(
      optax.safe_increment(state.count), inner, core.pack_worker(waiting)
    )

  return optax.GradientTransformationExtraArgs(init, update)
