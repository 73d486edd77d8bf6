"""Optimizer wrapper: a non-finite gradient on any worker skips the step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmotion import core
from jaxmotion.collectives.extend import (
  all_finite,
  check_weight,
  keep_update,
)
from jaxmotion.core import Array, AxisName, PyTree


class SkipNonfiniteState(NamedTuple):
  """State of the `skip_nonfinite` wrapper.

  Attributes:
    skipped: int32[], updates that were skipped.
    inner: the wrapped transformation's state.

  Example:
    >>> import optax
    >>> from jaxmotion import transforms
    >>> tx = transforms.skip_nonfinite(optax.sgd(0.1), "data")
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> int(transforms.init_state(tx, jnp.zeros(3), mesh).skipped)
    0
  """

  skipped: Array
  inner: PyTree


def skip_nonfinite(
  inner: optax.GradientTransformation,
  axis_name: AxisName,
  *,
  wait: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Skips the step on all workers if any worker's gradient is not finite.

  The same holds for the `weight=` that its `update` hands to the exchange.
  Unlike `optax.apply_if_finite`, the workers agree first (one 4-byte sum), so
  no worker takes the step alone. Unlike `exchange(nonfinite="skip")`, it covers
  the whole chain, moments and step counts included.

  Args:
    inner: the chain to guard, its `exchange` included.
    axis_name: the workers' axis.
    wait: whether what the chain sends waits for the workers' agreement. Give it
      where an exchange has a `start` or levels. Otherwise XLA:CPU may run the
      agreement's sum beside sums in a branch, and end in a crash.

  Returns:
    A transformation that emits zeros and keeps all of `inner`'s state, bit
    for bit, on a skipped step.

  Raises:
    TypeError: `inner` is no transformation, `axis_name` no name.

  Example:
    >>> from jaxmotion.transforms import exchange
    >>> chain = optax.chain(exchange("data"), optax.adam(1e-3))
    >>> tx = skip_nonfinite(chain, "data")
  """
  core.check_instance(
    "inner", inner, optax.GradientTransformation, "an optax transformation"
  )
  axis_name = core.flatten_axes("axis_name", axis_name)
  core.check_bool("wait", wait)
  wrapped = optax.with_extra_args_support(inner)

  def init_fn(params: PyTree) -> SkipNonfiniteState:
    core.check_arrays("params", params)
    return SkipNonfiniteState(jnp.zeros((), jnp.int32), wrapped.init(params))

  def update_fn(
    updates: PyTree,
    state: SkipNonfiniteState,
    params: PyTree | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, SkipNonfiniteState]:
    core.check_arrays("params", params)
    core.check_arrays("updates", updates)
    core.check_instance(
      "state", state, SkipNonfiniteState, "what `init` returned"
    )
    if jnp.shape(state.skipped):
      raise ValueError(
        "`state` must have a scalar `skipped`, got shape "
        f"{jnp.shape(state.skipped)}."
      )
    weight = extra_args.get("weight")
    check_weight(weight)
    ok = all_finite((updates, weight), axis_name)
    if wait:
      updates = jax.tree.map(lambda a: jnp.where(ok, a, 0), updates)
    new, inner_state = wrapped.update(
      updates, state.inner, params, **extra_args
    )
    new, inner_state = keep_update(ok, new, inner_state, state.inner)
    skipped = state.skipped + (1 - ok.astype(jnp.int32))
    return new, SkipNonfiniteState(skipped, inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
