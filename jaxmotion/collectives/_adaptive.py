"""All-reduce at a level that changes while one compiled program runs."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.collectives import (
  _all_reduce,
  _arguments,
  _layout,
)
from jaxmotion.core import Array, AxisName, PyTree


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
  names = core.flatten_axes("axis_name", axis_name)
  _arguments.count_workers(names)
  return lax.pmax(_arguments.as_level(level), names)


def check_level(level: Any, num_levels: int, axis_name: AxisName) -> Array:
  """Returns a level that is safe to branch on; raises if it is not."""
  # Workers that take different branches wait for each other forever, so the
  # level must be equal on all of them.
  core.check_int("num_levels", num_levels, 1)
  _arguments.count_workers(axis_name)
  if isinstance(level, bool):
    raise TypeError(f"`level` must be an integer scalar, got {level!r}.")
  if isinstance(level, int) and not 0 <= level < num_levels:
    raise ValueError(f"`level` must be in [0, {num_levels - 1}], got {level}.")
  value = _arguments.as_level(level)
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


def all_reduce_adaptive_init(
  x: PyTree,
  axis_name: AxisName,
  codecs: Sequence[Codec],
  *,
  method: str | None = None,
) -> PyTree:
  """Returns the state for `all_reduce_adaptive`, which all its codecs share.

  Args:
    x: pytree of arrays or ShapeDtypeStructs of the shapes to be reduced.
    axis_name: the workers' axis, or `HostAxes`.
    codecs: one codec for each level.
    method: "gather", "two_phase" or None, as for `all_reduce`.

  Raises:
    ValueError: no codecs, or codecs whose states differ in shape.

  Example:
    >>> from jaxmotion import codecs
    >>> levels = [codecs.feedback(codecs.uniform(bits=b)) for b in (4, 8)]
    >>> def run(x):
    ...   state = all_reduce_adaptive_init(x, "data", levels)
    ...   return all_reduce_adaptive(x, "data", levels, 0, state=state)[0]
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   run, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
    ... )
    >>> jax.eval_shape(f, jnp.ones(4)).shape
    (4,)
  """
  _arguments.check_codecs("codecs", codecs)
  core.check_arrays("x", x, numbers=False)
  core.check_axis_name("axis_name", axis_name)
  core.check_choice("method", method, _layout.METHODS)
  states = [
    _all_reduce.init_tree(x, axis_name, codec, method, canonical=True)
    for codec in codecs
  ]
  for codec, state in zip(codecs, states, strict=True):
    if not core.same_shapes(state, states[0]):
      raise ValueError(
        "`codecs` must have states of the same shapes (wrap them all in "
        f"feedback, or none), got {codecs[0]!r} and {codec!r}."
      )
  return states[0]


def all_reduce_adaptive(
  x: PyTree,
  axis_name: AxisName,
  codecs: Sequence[Codec],
  level: Any,
  *,
  state: PyTree | None = None,
  **options: Any,
) -> tuple[PyTree, PyTree]:
  """Runs `all_reduce` through the codec that `level` selects at run time.

  It compiles once for all levels and sends only the chosen codec's bytes,
  because the branch is around the collective.

  Args:
    x: pytree of floating-point arrays, this worker's own.
    axis_name: the workers' axis, or `HostAxes`.
    codecs: one codec for each level; their states must have the same shapes.
    level: int32[], equal on all workers. A traced level out of range is
      clamped to the nearest one.
    state: what `all_reduce_adaptive_init` or the last call returned.
    **options: `key`, `op`, `weight`, `method`, `sending` of `all_reduce`.

  Returns:
    The reduced tree and the new state.

  Raises:
    TypeError, ValueError: as `check_level` and `all_reduce`.

  Example:
    >>> from jaxmotion import codecs
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> levels = [codecs.uniform(bits=2), codecs.identity()]
    >>> def mean(x, level):
    ...   return all_reduce_adaptive(x, "data", levels, level)[0]
    >>> f = jax.jit(jax.shard_map(
    ...   mean, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P()
    ... ))
    >>> x = jnp.array([1.0, 0.25])
    >>> f(x, 0).tolist(), f(x, 1).tolist()
    ([1.0, 0.0], [1.0, 0.25])
  """
  _arguments.check_codecs("codecs", codecs)
  options = _all_reduce.check_options(x, axis_name, state, **options)
  level = check_level(level, len(codecs), axis_name)
  fresh = all_reduce_adaptive_init(
    x, axis_name, codecs, method=options["method"]
  )
  options |= dict(canonical=bool(jax.tree.leaves(fresh)))

  def reduce(codec: Codec, x: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    y, state = _all_reduce.reduce_tree(
      x, axis_name, codec, state=state, **options
    )
    return core.to_varying_like(y, x, axis_name), state

  branches = [functools.partial(reduce, codec) for codec in codecs]
  level = options["sending"].order_branch(level)
  return lax.switch(level, branches, x, state)
