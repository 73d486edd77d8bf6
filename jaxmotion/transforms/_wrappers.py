"""Wrappers of optimizers and gradients, for chains with an exchange."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxmotion import core
from jaxmotion.collectives import extend
from jaxmotion.core import Array, AxisName, PyTree
from jaxmotion.transforms import _global_view, _states
from jaxmotion.transforms._states import DelayedState, PerWorkerState


@core.declare(
  fun=core.function, axis_name=core.worker_axes, has_aux=core.boolean
)
def local_value_and_grad(
  fun: Callable[..., Any], axis_name: AxisName, *, has_aux: bool = False
) -> Callable[..., Any]:
  """Returns `jax.value_and_grad` whose gradient stays this worker's own.

  Inside `shard_map`, plain `jax.grad` with respect to replicated parameters
  sums the gradient over workers at full precision before any codec sees it.

  Args:
    fun: function whose first argument are the parameters.
    axis_name: the workers' axis.
    has_aux: whether `fun` returns (value, aux).

  Returns:
    A function like `jax.value_and_grad(fun)`, to call where the axis is bound.

  Raises:
    TypeError: an argument of another type.

  Example:
    >>> def loss(w, x):
    ...   return jnp.sum(w * x)
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def grads(w, x):
    ...   return local_value_and_grad(loss, "data")(w, x)[1]
    >>> split = jax.P("data")
    >>> jax.jit(jax.shard_map(
    ...   grads, mesh=mesh, in_specs=(jax.P(), split), out_specs=split
    ... ))(jnp.ones(2), jnp.array([3.0, 4.0])).tolist()
    [3.0, 4.0]
  """
  value_and_grad = jax.value_and_grad(fun, has_aux=has_aux)

  @core.declare(params=core.arrays)
  def wrapped(params: PyTree, *args: Any, **kwargs: Any) -> Any:
    return value_and_grad(core.to_varying(params, axis_name), *args, **kwargs)

  return wrapped


def _declare_update(cls: Any) -> Callable[..., Any]:
  """Makes an `update` check its arguments, and the class of its state."""
  return core.declare(
    updates=core.arrays, params=core.arrays, state=_states.state_of(cls)
  )


@core.declare(inner=_states.as_transformation, axis_name=core.worker_axes)
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
    axis_name: the workers' axis.

  Returns:
    A transformation that does the same with each worker's own updates.

  Raises:
    TypeError: `inner` is no transformation, `axis_name` no name. `update`
      raises it for a state of another transformation.
    ValueError: `init` or `update` runs where the axis is not bound, for
      gradients other than those of `jaxmotion.value_and_grad`.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.transforms import exchange
    >>> tx = optax.chain(
    ...   per_worker(optax.trace(0.9), "data"),
    ...   exchange("data", codecs.feedback(codecs.topk(density=0.01))),
    ...   optax.sgd(0.1),
    ... )
  """
  wrapped = optax.with_extra_args_support(inner)

  def mark(state: PyTree) -> PerWorkerState:
    # A count is typed as equal on all workers, and yet has a row of its own.
    return PerWorkerState(core.pack_worker(core.to_varying(state, axis_name)))

  @core.declare(params=core.arrays)
  def init_fn(params: PyTree) -> PerWorkerState:
    core.axis_size(axis_name)
    return mark(wrapped.init(params))

  @_declare_update(PerWorkerState)
  def update_fn(
    updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, PerWorkerState]:
    """Transforms a worker's own updates, and its own state."""
    core.axis_size(axis_name)
    own = core.unpack_worker(state.inner)
    updates, own = wrapped.update(
      core.to_varying(updates, axis_name), own, params, **extra_args
    )
    return core.to_varying(updates, axis_name), mark(own)

  tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  return _global_view.run_anywhere(tx, axis_name, stays_own=True)


@core.declare(
  inner=_states.as_transformation,
  axis_name=core.worker_axes,
  wait=core.boolean,
)
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
  wrapped = optax.with_extra_args_support(inner)

  @core.declare(params=core.arrays)
  def init_fn(params: PyTree) -> _states.SkipNonfiniteState:
    return _states.SkipNonfiniteState(
      jnp.zeros((), jnp.int32), wrapped.init(params)
    )

  @_declare_update(_states.SkipNonfiniteState)
  def update_fn(
    updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, _states.SkipNonfiniteState]:
    """Runs the chain; keeps its state if a worker's gradient is not finite."""
    weight = extra_args.get("weight")
    extend.check_weight("weight", weight)
    ok = extend.all_finite((updates, weight), axis_name)
    if wait:
      updates = jax.tree.map(lambda a: jnp.where(ok, a, 0), updates)
    new, inner_state = wrapped.update(
      updates, state.inner, params, **extra_args
    )
    new, inner_state = extend.keep_update(ok, new, inner_state, state.inner)
    skipped = state.skipped + (1 - ok.astype(jnp.int32))
    return new, _states.SkipNonfiniteState(skipped, inner_state)

  tx = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  return _global_view.run_anywhere(tx, axis_name)


@core.declare(
  tx=_states.as_transformation,
  axis_name=core.worker_axes,
  is_weighted=core.boolean,
)
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
    An optax transformation whose state is an `extend.DelayedState`. Its update
    takes this worker's own gradient.

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
  chain = optax.with_extra_args_support(tx)

  @core.declare(params=core.arrays)
  def init(params: PyTree) -> DelayedState:
    """Makes the state before the first step, which applies zeros."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    weight = jnp.zeros((), jnp.float32) if is_weighted else None
    pending = core.to_varying((zeros, weight), axis_name)
    return DelayedState(
      jnp.zeros((), jnp.int32), chain.init(params), core.pack_worker(pending)
    )

  @_declare_update(DelayedState)
  def update(
    updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any
  ) -> tuple[PyTree, DelayedState]:
    """Applies the pending gradient, and keeps the new one for the next step."""
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
    new, inner = chain.update(pending, state.inner, params, **extra_args)
    waiting = core.to_varying((updates, own_weight), axis_name)
    return new, DelayedState(
      optax.safe_increment(state.count), inner, core.pack_worker(waiting)
    )

  own = optax.GradientTransformationExtraArgs(init, update)
  return _global_view.run_anywhere(own, axis_name)


@core.declare(
  max_norm=core.number(0, 2.0**63, open_low=True), axis_name=core.worker_axes
)
def clip_by_global_norm(
  max_norm: float, axis_name: AxisName
) -> optax.GradientTransformation:
  """Clips the mean gradient by its norm over all workers' parts.

  It is `optax.clip_by_global_norm` for the chain inside of `sharded`, where
  each worker has a part of the gradient. The workers add their sums of squares
  (one 4-byte sum). Leaves that all workers hold whole count once. So do shards
  of a model, which `specs` of `make_train_step` name, by a sum over its axes.

  Args:
    max_norm: greatest norm of the whole gradient, positive.
    axis_name: the axes that `sharded` was given.

  Returns:
    A transformation without state. Types tell it which leaves are parts, so
    its `update` runs inside a `shard_map` with `check_vma`.

  Raises:
    TypeError, ValueError: `max_norm` is no positive number, or `axis_name` no
      name. `update` raises a ValueError where types do not tell.

  Example:
    >>> from jaxmotion.transforms import sharded
    >>> clip = clip_by_global_norm(1.0, "data")
    >>> tx = sharded("data", optax.chain(clip, optax.adamw(3e-4)))
  """
  # Greater ones have no square in float32.

  @_declare_update(optax.EmptyState)
  def update_fn(
    updates: PyTree, state: Any, params: PyTree | None = None
  ) -> tuple[PyTree, Any]:
    """Scales all leaves down if their norm is greater than `max_norm`."""
    core.axis_size(axis_name)
    if not core.tracks_varying(axis_name):
      raise ValueError(
        "`axis_name` must be an axis of a `jax.shard_map` with `check_vma=True`"
        f", where types tell which leaves are parts, got {axis_name!r}."
      )
    updates = jax.tree.map(jnp.asarray, updates)
    # Parts of workers, and shards of a model: each is added up where it varies.
    sums: dict[tuple[Any, ...], Array] = {}
    for x in jax.tree.leaves(updates):
      axes = tuple(sorted(core.varying_axes(x), key=str))
      wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
      sums[axes] = sums.get(axes, jnp.float32(0)) + jnp.sum(jnp.square(wide))
    total = jnp.float32(0)
    for axes, own in sums.items():
      total = total + (lax.psum(own, axes) if axes else own)
    norm = jnp.sqrt(total)

    def clip_leaf(x: Array) -> Array:
      clipped = (x / norm.astype(x.dtype)) * max_norm
      return jnp.where(norm < max_norm, x, clipped)

    return jax.tree.map(clip_leaf, updates), state

  return optax.GradientTransformation(lambda _: optax.EmptyState(), update_fn)
