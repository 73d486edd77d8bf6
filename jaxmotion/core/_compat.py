"""The one place that knows how JAX spells mesh axes and varying values.

Inside `shard_map(check_vma=True)` a value's type says over which axes it
varies. `pmap` and `check_vma=False` bind the same axis names but track
nothing: there `varying` is empty for every value, casts do nothing, and the
functions below say so instead of guessing.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import batching, mlir
from jax.sharding import ManualAxisType

from jaxmotion.core._types import Array, AxisName, PyTree


def axis_names(axis_name: AxisName) -> tuple[Any, ...]:
  """Returns the axis names as a tuple.

  >>> axis_names("data"), axis_names(("host", "device"))
  (('data',), ('host', 'device'))
  """
  return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def axis_is_bound(axis_name: AxisName) -> bool:
  """Says whether every name is an axis of an enclosing shard_map or pmap.

  >>> axis_is_bound("data")
  False
  """
  try:
    for name in axis_names(axis_name):
      lax.axis_size(name)
  except NameError:
    return False
  return True


def axis_size(axis_name: AxisName) -> int:
  """Returns the number of workers along the axis (a static int).

  Args:
    axis_name: a name or a tuple of names.

  Raises:
    ValueError: a name is not an axis of an enclosing shard_map or pmap.

  >>> axis_size("nowhere")
  Traceback (most recent call last):
  ...
  ValueError: `axis_name` must name an axis of the enclosing shard_map or \
pmap, got 'nowhere'.
  """
  if not axis_is_bound(axis_name):
    raise ValueError(
      "`axis_name` must name an axis of the enclosing shard_map or pmap, "
      f"got {axis_name!r}."
    )
  return math.prod(lax.axis_size(name) for name in axis_names(axis_name))


def worker_index(axis_name: AxisName) -> Array:
  """Returns this worker's index along the axis, int32[].

  Raises:
    ValueError: as `axis_size`.
  """
  axis_size(axis_name)
  return lax.axis_index(axis_name)


def varying_axes(x: Any) -> frozenset:
  """Returns the mesh axes over which `x` is typed as varying."""
  return jax.typeof(x).manual_axis_type.varying


def tracks_varying(axis_name: AxisName) -> bool:
  """Says whether types record variation over the axis (not under pmap)."""
  return bool(
    varying_axes(worker_index(axis_name)) & set(axis_names(axis_name))
  )


def is_varying(x: Any, axis_name: AxisName) -> bool:
  """Says whether `x` is typed as varying over any of the axes."""
  return bool(varying_axes(x) & set(axis_names(axis_name)))


def shape_varying_like(
  shape: Sequence[int], dtype: Any, sources: PyTree
) -> jax.ShapeDtypeStruct:
  """Returns the type of an array that is made of others.

  Args:
    shape: of the array.
    dtype: of the array.
    sources: arrays; it varies over the axes over which any of them does.
  """
  axes = frozenset().union(*map(varying_axes, jax.tree.leaves(sources)))
  return jax.ShapeDtypeStruct(
    tuple(shape), dtype, manual_axis_type=ManualAxisType(varying=axes)
  )


def abstract_like(x: Any) -> Any:
  """Returns something of the type of `x` that a function can be traced with.

  Args:
    x: array, or a value's type as jaxprs have it.

  >>> abstract_like(1.0)
  ShapeDtypeStruct(shape=(), dtype=float32)
  """
  aval = x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)
  axes = tuple(sorted(aval.manual_axis_type.varying, key=str))
  if axes:  # Which JAX traces no shapes of, only arrays.
    return to_varying(jnp.zeros(aval.shape, aval.dtype), axes)
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def closed_jaxpr(jaxpr: Any) -> ClosedJaxpr:
  """Returns a jaxpr with its constants; JAX 0.12 has one class for both."""
  if isinstance(jaxpr, ClosedJaxpr):
    return jaxpr
  return ClosedJaxpr(jaxpr, list(getattr(jaxpr, "consts", None) or ()))


def scan_parts(params: Any) -> tuple[ClosedJaxpr, int, int]:
  """Returns a scan's body, and how many constants and carried values it has.

  Args:
    params: of its equation.
  """
  body = closed_jaxpr(params["jaxpr"])
  if "num_consts" in params:
    return body, params["num_consts"], params["num_carry"]
  consts, carry, _ = params["ft_in"].unpack()  # From JAX 0.11 on.
  return body, len(consts.vals), len(carry.vals)


def to_varying(tree: PyTree, axis_name: AxisName) -> PyTree:
  """Types every leaf as varying over the axis; the values do not change.

  Without it, `jax.grad` with respect to replicated parameters inserts an
  uncompressed psum of the gradient.

  Args:
    tree: pytree of arrays.
    axis_name: a bound axis, or several.

  Returns:
    The same pytree.
  """

  def cast(x: Any) -> Any:
    missing = set(axis_names(axis_name)) - varying_axes(x)
    # Sorted by position: a set's order differs from process to process.
    names = tuple(a for a in axis_names(axis_name) if a in missing)
    return lax.pcast(x, names, to="varying") if names else x

  return jax.tree.map(cast, tree)


_same_on_workers = Primitive("assert_replicated")
_same_on_workers.def_impl(lambda x, axes: x)
mlir.register_lowering(_same_on_workers, lambda ctx, x, axes: [x])
batching.defvectorized(_same_on_workers)


@_same_on_workers.def_abstract_eval
def _typed_as_same(x: Any, axes: tuple[Any, ...]) -> Any:
  kind = x.manual_axis_type
  return x.update(
    manual_axis_type=kind.update(varying=kind.varying - set(axes))
  )


def assert_replicated(tree: PyTree, axis_name: AxisName) -> PyTree:
  """Types every leaf as the same on all workers: the caller vouches for it.

  `all_gather` makes such values because it is known to; a gather that is put
  together from other collectives has to say so.

  Args:
    tree: pytree of arrays that have the same bits on every worker.
    axis_name: a bound axis, or several.
  """
  axes = axis_names(axis_name)
  return jax.tree.map(lambda x: _same_on_workers.bind(x, axes=axes), tree)
