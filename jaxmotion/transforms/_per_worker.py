"""Optimizer wrapper: state of which every worker has its own."""

from typing import Any, NamedTuple

import optax

from jaxmotion import core
from jaxmotion.core import AxisName, PyTree


class PerWorkerState(NamedTuple):
  """State of the `per_worker` wrapper.

  Attributes:
    inner: the wrapped transformation's state, each worker's own.

  Example:
    >>> import optax
    >>> from jaxmotion import transforms
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> tx = transforms.per_worker(optax.trace(0.9), "data")
    >>> state = transforms.init_state(tx, jnp.zeros(3), mesh)
    >>> [a.shape for a in jax.tree.leaves(state.inner)]
    [(1, 3)]
  """

  inner: core.PerWorker


def per_worker(
  inner: optax.GradientTransformation, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
  """Gives every worker its own state of a transformation.

  A transformation before the exchange sees a worker's own gradients. What it
  remembers of them, such as a momentum, differs between workers and is lost or
  refused unless it is marked. This wrapper marks it: its state has a leading
  axis of workers, and `state_specs` splits that axis.

  Args:
    inner: transformation that comes before the `exchange`.
    axis_name: the workers' axis. It must be bound where `init` and `update`
      run; `make_train_step` and `init_state` bind it.

  Returns:
    A transformation that does the same with each worker's own updates.

  Raises:
    TypeError: `inner` is no transformation, `axis_name` no name. `update`
      raises it for a state of another transformation.
    ValueError: `init` or `update` runs where the axis is not bound.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.transforms import exchange
    >>> tx = optax.chain(
    ...   per_worker(optax.trace(0.9), "data"),
    ...   exchange("data", codecs.feedback(codecs.topk(density=0.01))),
    ...   optax.sgd(0.1),
    ... )
  """
  core.check_instance(
    "inner", inner, optax.GradientTransformation, "an optax transformation"
  )
  axis_name = core.flatten_axes("axis_name", axis_name)
  wrapped = optax.with_extra_args_support(inner)

  def mark(state: PyTree) -> PerWorkerState:
    # A count is typed as equal on all workers, and yet has a row of its own.
    return PerWorkerState(core.pack_worker(core.to_varying(state, axis_name)))

  def init_fn(params: PyTree) -> PerWorkerState:
    core.check_arrays("params", params)
    core.axis_size(axis_name)
    return mark(wrapped.init(params))

  def update_fn(
    updates: PyTree,
    state: PerWorkerState,
    params: PyTree | None = None,
    **extra_args: Any,
  ) -> tuple[PyTree, PerWorkerState]:
    core.check_arrays("params", params)
    core.check_arrays("updates", updates)
    core.check_instance("state", state, PerWorkerState, "what `init` returned")
    core.axis_size(axis_name)
    own = core.unpack_worker(state.inner)
    updates, own = wrapped.update(
      core.to_varying(updates, axis_name), own, params, **extra_args
    )
    return core.to_varying(updates, axis_name), mark(own)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
