"""A level that adapts while one compiled program runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs import Codec
from jaxmotion.collectives._all_reduce import (
  all_reduce,
  all_reduce_init,
  canonical_state,
)
from jaxmotion.core import (
  Array,
  AxisName,
  PyTree,
  axis_names,
  is_varying,
  shape_string,
  tracks_varying,
)


def max_over_workers(level: Array, axis_name: AxisName) -> Array:
  """Makes a level equal on all workers: the highest that any of them has.

  Args:
    level: int32[].
    axis_name: the workers' axis.
  """
  return lax.pmax(level, axis_name)


def check_level(level: Any, rungs: int, axis_name: AxisName) -> Array:
  """Returns a level that is safe to branch on; raises if it is not.

  Workers that take different branches wait for each other for ever, so the
  level must be equal on all of them. Where types record variation (inside
  `shard_map`) a level that may differ is an error; where they do not (`pmap`)
  the workers agree on the highest.

  Args:
    level: integer scalar.
    rungs: number of levels.
    axis_name: the workers' axis.

  Raises:
    TypeError: not an integer scalar.
    ValueError: out of range (a Python int), or varying over the axis.
  """
  if isinstance(level, int) and not 0 <= level < rungs:
    raise ValueError(f"`level` must be in [0, {rungs - 1}], got {level}.")
  value = jnp.asarray(level)
  if value.ndim or not jnp.issubdtype(value.dtype, jnp.integer):
    raise TypeError(
      f"`level` must be an integer scalar, got {shape_string(value)}."
    )
  if is_varying(value, axis_name):
    raise ValueError(
      "`level` must be equal on all workers, got a value that varies over "
      f"{axis_names(axis_name)}: make it so with "
      "jaxmotion.collectives.max_over_workers(level, axis_name)."
    )
  if not tracks_varying(axis_name):
    value = max_over_workers(value, axis_name)
  return value


def all_reduce_adaptive_init(
  x: PyTree,
  axis_name: AxisName,
  codecs: Sequence[Codec],
  *,
  method: str | None = None,
) -> PyTree:
  """Returns the state for `all_reduce_adaptive`: one that all codecs share.

  Args:
    x: pytree of arrays or ShapeDtypeStructs of the shapes to be reduced.
    axis_name: the workers' axis.
    codecs: one for each level.
    method: as for `all_reduce`.

  Raises:
    ValueError: no codecs, or codecs whose states differ in shape.
  """
  if not codecs:
    raise ValueError("`codecs` must hold at least one codec, got none.")
  states = [
    canonical_state(
      codec, x, all_reduce_init(x, axis_name, codec, method=method)
    )
    for codec in codecs
  ]

  def spell(state: PyTree) -> tuple:
    leaves, treedef = jax.tree.flatten(state)
    return treedef, [shape_string(a) for a in leaves]

  for codec, state in zip(codecs, states, strict=True):
    if spell(state) != spell(states[0]):
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
  """`all_reduce` through the codec that `level` picks at run time.

  Compiles once for all levels and sends only the chosen codec's bytes: the
  branch is around the collective.

  Args:
    x: pytree of floating-point arrays, this worker's own.
    axis_name: the workers' axis.
    codecs: one for each level; their states must have the same shapes.
    level: int32[], equal on all workers. A traced level out of range is
      clamped to the nearest rung.
    state: what `all_reduce_adaptive_init` or the last call returned.
    **options: `key`, `op`, `weight`, `method` of `all_reduce`.

  Returns:
    The reduced tree and the new state.

  Raises:
    TypeError, ValueError: as `check_level` and `all_reduce`.

  Example:
    >>> from jaxmotion import codecs
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> rungs = [codecs.uniform(bits=2), codecs.identity()]
    >>> def mean(x, level):
    ...   return all_reduce_adaptive(x, "data", rungs, level)[0]
    >>> f = jax.jit(jax.shard_map(
    ...   mean, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P()
    ... ))
    >>> x = jnp.array([1.0, 0.25])
    >>> f(x, 0).tolist(), f(x, 1).tolist()
    ([1.0, 0.0], [1.0, 0.25])
  """
  level = check_level(level, len(codecs), axis_name)
  method = options.get("method")
  fresh = all_reduce_adaptive_init(x, axis_name, codecs, method=method)
  state = fresh if state is None and not jax.tree.leaves(fresh) else state

  def branch(codec: Codec) -> Callable[[PyTree, PyTree], tuple]:
    def reduce(x: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
      y, state = all_reduce(x, axis_name, codec, state=state, **options)
      return y, canonical_state(codec, x, state)

    return reduce

  return lax.switch(level, [branch(codec) for codec in codecs], x, state)
