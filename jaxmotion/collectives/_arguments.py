"""Arguments of collectives: their checks, weights, levels and gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec
from jaxmotion.core import Array, AxisName, PyTree

stateless = core.optional(
  functools.partial(check_codec, stateless=True, one_round=True)
)
NONFINITE_POLICIES = ("propagate", "skip", "zero")


def check_axes(name: str, value: Any) -> Any:
  """Returns axes of workers as they are given, or raises."""
  core.worker_axes(name, value)
  return value


def check_state(
  expected: PyTree, state: PyTree | None, canonical: PyTree = None
) -> PyTree:
  """Returns the state to use; raises unless it has the expected shapes."""
  # expected, canonical: shapes of a fresh state and of its canonical form,
  # which is accepted too.
  core.arrays("state", state)
  if not jax.tree.leaves((expected, state)):
    return expected
  if state is None:
    raise ValueError(
      "`state` must be given for a codec that has one (make it with the "
      "collective's `..._init`, for `all_to_all` with `reduce_scatter_init`), "
      "got None."
    )
  if not (
    core.same_shapes(state, expected) or core.same_shapes(state, canonical)
  ):
    raise ValueError(
      "`state` must be made for this codec, tree and number of workers: "
      f"expected {core.shape_strings(expected)}, got "
      f"{core.shape_strings(state)}."
    )
  return state


def check_weight(name: str, weight: Any) -> Any:
  """Returns a real scalar, finite if it is known, or None, or raises."""
  if weight is None:
    return None
  # The value of a traced weight is not known. Where it is not finite, it makes
  # the result not finite on all workers.
  is_traced = isinstance(weight, jax.core.Tracer)
  try:
    value = weight if is_traced else np.asarray(weight)
  except ValueError as error:  # A list of lists of unequal lengths.
    raise TypeError(f"`{name}` must be a scalar, got {weight!r}.") from error
  kinds = (jnp.floating, jnp.integer)
  if not any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
    raise TypeError(f"`{name}` must be a real number, got {weight!r}.")
  if value.ndim:
    raise ValueError(
      f"`{name}` must be a scalar, got an array {core.shape_string(value)}."
    )
  if not is_traced and not np.isfinite(np.float64(value)):
    raise ValueError(f"`{name}` must be finite, got {weight!r}.")
  return weight


def apply_weight(
  x: PyTree, weight: Any, axis_name: AxisName, op: str
) -> PyTree:
  """Returns `x` times its weight, which a mean divides by the mean weight."""
  if weight is None:
    return x
  w = core.to_varying(jnp.asarray(weight, jnp.float32), axis_name)
  if op == "mean":
    # The mean of the weights, and not their sum, which may overflow.
    mean = lax.psum(w / core.axis_size(axis_name), axis_name)
    # The mean that follows divides by the number of workers. Zero over a mean
    # of zero counts as zero. Any other weight over it stays infinite.
    w = jnp.where(w == 0, 0.0, w / mean)

  # Shares that were rounded to a narrow dtype would no longer add up to 1, so
  # arrays become float32 at least.
  def scale_leaf(a: Array) -> Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return a.astype(wide) * w.astype(wide)

  return jax.tree.map(scale_leaf, x)


def all_finite(tree: PyTree, axis_name: AxisName) -> Array:
  """Returns whether every element on every worker is finite."""
  # Returns bool[], equal on all workers, who agree on it by one 4-byte sum.
  bad = [~jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
  count = sum((b.astype(jnp.int32) for b in bad), jnp.int32(0))
  return lax.psum(core.to_varying(count, axis_name), axis_name) == 0


def apply_nonfinite_policy(
  policy: str, x: PyTree, axis_name: AxisName
) -> tuple[PyTree, Array | None]:
  """Prepares gradients for a collective by a policy for non-finite ones."""
  # "propagate" leaves the elements alone: they reach every worker, and each
  # codec says how they decode. "skip" leaves them alone too. But if any worker
  # has one, `keep_update` then discards the exchange on all workers.
  # Returns the tree, and bool[] for `keep_update`; None always keeps the
  # result.
  if policy == "zero":
    x = zero_nonfinite(x)
  return x, all_finite(x, axis_name) if policy == "skip" else None


def zero_nonfinite(x: PyTree) -> PyTree:
  """Replaces elements that are not finite by zeros."""
  return jax.tree.map(lambda a: jnp.where(jnp.isfinite(a), a, 0), x)


def keep_update(
  ok: Array | None, updates: PyTree, state: PyTree, old_state: PyTree
) -> tuple[PyTree, PyTree]:
  """Returns updates and state, or zeros and the old state if not `ok`."""
  # ok: bool[], equal on all workers; None keeps the update. The old state is
  # kept bit for bit.
  if ok is None:
    return updates, state
  updates = jax.tree.map(lambda a: jnp.where(ok, a, jnp.zeros_like(a)), updates)
  state = jax.tree.map(lambda a, b: jnp.where(ok, a, b), state, old_state)
  return updates, state


def check_local_codec(axis_name: AxisName, local_codec: Any) -> None:
  """Raises if a codec within a host is given where axes name no hosts."""
  if local_codec is not None and not isinstance(axis_name, core.HostAxes):
    raise ValueError(
      f"`local_codec` must be None without hosts, got {local_codec!r}: give "
      '`axis_name` as jaxmotion.HostAxes("host", "device").'
    )


def check_position(name: str, axis: Any, ndim: int) -> int:
  """Returns the position of an axis as a non-negative int, or raises."""
  message = f"`{name}` must be an axis of {ndim}, got {axis!r}."
  if type(axis) is not int:
    raise TypeError(message)
  if not -ndim <= axis < ndim:
    raise ValueError(message)
  return axis % ndim


def as_level(level: Any) -> Any:
  """Returns a level as an array; raises unless it is an integer scalar."""
  message = "`level` must be an integer scalar, got "
  try:
    value = jnp.asarray(level)
  except (OverflowError, TypeError, ValueError) as error:
    raise TypeError(f"{message}{level!r:.200}.") from error
  if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
    raise TypeError(f"{message}{core.shape_string(value)}.")
  return value


def check_codecs(name: str, codec: Any) -> Any:
  """Returns a codec, or a sequence of one for each level, or raises."""
  levels = (codec,) if isinstance(codec, codecs.Codec) else codec
  if not isinstance(levels, list | tuple) or not all(
    isinstance(one, codecs.Codec) for one in levels
  ):
    raise TypeError(
      f"`{name}` must be a codec, such as codecs.uniform(bits=8), or a list of "
      f"codecs with one for each level, got {levels!r}."
    )
  if not levels:
    raise ValueError(f"`{name}` must hold at least one codec, got none.")
  return codec


def check_level_given(level: Any, codec: Any) -> None:
  """Raises unless `level` is given for a sequence of codecs, and only then."""
  if (level is None) != isinstance(codec, codecs.Codec):
    raise ValueError(
      "`level` must be given if `codec` is a sequence of codecs, and only then,"
      f" got {level!r} for codec {codec!r}."
    )


@core.declare(axis_name=core.worker_axes)
def max_over_workers(level: Array, axis_name: AxisName) -> Array:
  """Returns the highest level of any worker, equal on all of them.

  Args:
    level: int32[], this worker's own.
    axis_name: the workers' axis, or `HostAxes`.

  Example:
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   lambda x: max_over_workers(x[0], "data"),
    ...   mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(),
    ... )
    >>> int(jax.jit(f)(jnp.array([2])))
    2
  """
  core.axis_size(axis_name)  # Raises unless it is bound.
  return lax.pmax(as_level(level), axis_name)


def check_level(level: Any, num_levels: int, axis_name: AxisName) -> Array:
  """Returns a level that is safe to branch on; raises if it is not."""
  # Workers that take different branches wait for each other forever, so the
  # level must be equal on all of them.
  if isinstance(level, bool):
    raise TypeError(f"`level` must be an integer scalar, got {level!r}.")
  if isinstance(level, int) and not 0 <= level < num_levels:
    raise ValueError(f"`level` must be in [0, {num_levels - 1}], got {level}.")
  value = as_level(level)
  # Inside `shard_map` types record variation: a level that may differ is an
  # error.
  if core.is_varying(value, axis_name):
    raise ValueError(
      "`level` must be equal on all workers, got a value that varies over "
      f"{core.axis_names(axis_name)}: make it so with "
      "jaxmotion.collectives.max_over_workers(level, axis_name)."
    )
  # Inside `pmap` they do not, so the workers agree on the highest level.
  if not core.tracks_varying(axis_name):
    value = max_over_workers(value, axis_name)
  return value


def straight_through(
  reference_op: Callable[[PyTree], PyTree], x: PyTree, y: PyTree
) -> PyTree:
  """Returns `y` with the gradient that `reference_op(x)` would have."""
  types = jax.tree.map(jax.typeof, x)

  # Transposed only when it is needed: a transpose made here would hold tracers
  # of this call, which `jax.checking_leaks` reports.
  def pull_back(ct: PyTree, key: core.Key | None) -> PyTree:
    (x_ct,) = jax.linear_transpose(reference_op, types)(ct)
    return x_ct

  return with_gradient(pull_back, x, y, None)


def with_gradient(
  pull_back: Callable[[PyTree, core.Key | None], PyTree],
  x: PyTree,
  y: PyTree,
  key: core.Key | None,
) -> PyTree:
  """Returns `y` with the gradient that `pull_back` makes of its own."""
  through = jax.custom_vjp(lambda x, y, key: y)

  def backward(
    key: core.Key | None, ct: PyTree
  ) -> tuple[PyTree, PyTree, core.Key | None]:
    """Returns cotangents of `x`, of `y` and of the key, two of them zeros."""
    zeros = jax.custom_derivatives.zero_from_primal(key)
    return pull_back(ct, key), jax.tree.map(jnp.zeros_like, ct), zeros

  through.defvjp(lambda x, y, key: (y, key), backward)
  return through(x, y, key)


def reference_reduce(
  axis_name: AxisName, op: str, weight: Array | float | None
) -> Callable[[PyTree], PyTree]:
  """Makes the all-reduce without a codec, whose gradient `all_reduce` has."""
  collective = lax.pmean if op == "mean" else lax.psum

  def reduce(x: PyTree) -> PyTree:
    weighted = apply_weight(x, weight, axis_name, op)
    weighted = jax.tree.map(lambda w, a: w.astype(a.dtype), weighted, x)
    return collective(weighted, axis_name)

  return reduce
