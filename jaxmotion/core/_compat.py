"""Mesh axes and varying types, and everything that depends on JAX's version.

Inside `shard_map(check_vma=True)` the type of a value holds the axes over which
it varies. `pmap`, `vmap` and `check_vma=False` bind axis names but track
nothing: there `varying` is empty for every value and casts do nothing.
`tracks_varying` tells the two apart.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching, mlir
from jax.sharding import AxisType, ManualAxisType

from jaxmotion.core import _types
from jaxmotion.core._jax_extend import jax_core


def axis_names(axis_name: _types.AxisName) -> tuple[Any, ...]:
  """Returns the axis names as a tuple.

  >>> axis_names("data"), axis_names(("host", "device"))
  (('data',), ('host', 'device'))
  """
  return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def spec_axes(entry: Any) -> tuple[Any, ...]:
  """Returns the axis names in one entry of a PartitionSpec.

  Args:
    entry: None, a name, a tuple of names, or `PartitionSpec.UNCONSTRAINED`,
      which is returned as if it were a name.

  >>> spec_axes(None), spec_axes("data"), spec_axes(("host", "device"))
  ((), ('data',), ('host', 'device'))
  """
  return () if entry is None else axis_names(entry)


def axis_is_bound(axis_name: _types.AxisName) -> bool:
  """Returns whether every name is an axis of an enclosing shard_map or pmap.

  >>> axis_is_bound("data")
  False
  """
  try:
    for name in axis_names(axis_name):
      lax.axis_size(name)
  except NameError:
    return False
  return True


def axis_size(axis_name: _types.AxisName, name: str = "axis_name") -> int:
  """Returns the number of workers along the axis (a static int).

  Args:
    axis_name: a name or a tuple of names.
    name: the argument's name, for the message.

  Raises:
    ValueError: a name is not an axis of an enclosing shard_map or pmap.

  >>> axis_size("nowhere")
  Traceback (most recent call last):
  ...
  ValueError: `axis_name` must name an axis of the enclosing shard_map or \
pmap, got 'nowhere': train by jaxmotion.data_parallel, or call this inside of \
jax.shard_map, with a state made by jaxmotion.bind_mesh(tx, mesh).
  """
  if not axis_is_bound(axis_name):
    raise ValueError(
      f"`{name}` must name an axis of the enclosing shard_map or pmap, "
      f"{_describe_unbound(axis_name)}"
    )
  return math.prod(lax.axis_size(name) for name in axis_names(axis_name))


def _describe_unbound(axis_name: _types.AxisName) -> str:
  """Describes an axis that is not bound, beside those that are."""
  mapped = sorted(map(str, _mapped_axes()))
  if not mapped:
    return (
      f"got {axis_name!r}: train by jaxmotion.data_parallel, or call this "
      "inside of jax.shard_map, with a state made by jaxmotion.bind_mesh(tx, "
      "mesh)."
    )
  wrong = [a for a in axis_names(axis_name) if not axis_is_bound(a)]
  near = difflib.get_close_matches(str(wrong[0]), mapped, n=1)
  end = f"; did you mean {near[0]!r}?" if near else "."
  return f"which has {', '.join(map(repr, mapped))}, got {axis_name!r}{end}"


def worker_index(axis_name: _types.AxisName) -> _types.Array:
  """Returns this worker's index along the axis, int32[].

  Raises:
    ValueError: a name is not an axis of an enclosing shard_map or pmap.
  """
  axis_size(axis_name)
  return lax.axis_index(axis_name)


def varying_axes(x: Any) -> frozenset[Any]:
  """Returns the mesh axes over which `x` is typed as varying.

  Args:
    x: array, or the abstract value of a jaxpr's variable.
  """
  return _aval_of(x).manual_axis_type.varying


def _aval_of(x: Any) -> Any:
  return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def tracks_varying(axis_name: _types.AxisName) -> bool:
  """Returns whether types record variation over the axis (not under pmap)."""
  return bool(
    varying_axes(worker_index(axis_name)) & set(axis_names(axis_name))
  )


def is_varying(x: Any, axis_name: _types.AxisName) -> bool:
  """Returns whether `x` is typed as varying over any of the axes."""
  return bool(varying_axes(x) & set(axis_names(axis_name)))


def shape_varying_like(
  shape: Sequence[int], dtype: Any, sources: _types.PyTree
) -> jax.ShapeDtypeStruct:
  """Returns the type of an array that is computed from other arrays.

  Args:
    shape: shape of the array.
    dtype: dtype of the array.
    sources: pytree of arrays; the result varies over all axes of any of them.
  """
  axes = frozenset().union(*map(varying_axes, jax.tree.leaves(sources)))
  return jax.ShapeDtypeStruct(
    tuple(shape), dtype, manual_axis_type=ManualAxisType(varying=axes)
  )


def abstract_like(x: Any) -> Any:
  """Returns an abstract stand-in for `x`, with which a function can be traced.

  It is a ShapeDtypeStruct, or zeros if `x` varies over mesh axes.

  Args:
    x: array, shape, or the abstract value of a jaxpr's variable.

  >>> like = abstract_like(1.0)
  >>> like.shape, str(like.dtype)
  ((), 'float32')
  """
  aval = x if isinstance(x, jax.ShapeDtypeStruct) else _aval_of(x)
  kind = aval.manual_axis_type  # None of a shape without one.
  axes = tuple(sorted(kind.varying, key=str)) if kind else ()
  if axes:  # JAX traces with varying arrays, but not with varying shapes.
    return to_varying(jnp.zeros(aval.shape, aval.dtype), axes)
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def abstract_on_mesh(x: Any) -> Any:
  """Returns an abstract stand-in for `x` that says how it lies on a mesh.

  A function can be traced with it, but not compiled: the mesh is abstract.

  Args:
    x: array, or the abstract value of a jaxpr's variable.

  >>> abstract_on_mesh(1.0)
  ShapeDtypeStruct(shape=(), dtype=float32)
  """
  like = abstract_like(x)
  sharding = getattr(_aval_of(x), "sharding", None)
  mesh = getattr(sharding, "mesh", None)
  is_shape = isinstance(like, jax.ShapeDtypeStruct)
  if not is_shape or mesh is None or mesh.empty:
    return like
  return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)


def is_compiler_partitioned(x: Any) -> bool:
  """Says whether a compiler may partition an array over several devices.

  Args:
    x: array or tracer.

  >>> is_compiler_partitioned(jnp.zeros(2))
  False
  """
  mesh = getattr(getattr(_aval_of(x), "sharding", None), "mesh", None)
  if mesh is None or mesh.empty:
    return False
  sizes = dict(mesh.shape)
  kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
  return any(sizes[a] > 1 for a, kind in kinds if kind == AxisType.Auto)


def closed_jaxpr(jaxpr: Any) -> jax_core.ClosedJaxpr:
  """Returns a jaxpr with its constants; in JAX 0.12 one class is both."""
  if isinstance(jaxpr, jax_core.ClosedJaxpr):
    return jaxpr
  return jax_core.ClosedJaxpr(jaxpr, list(getattr(jaxpr, "consts", None) or ()))


def scan_parts(params: Any) -> tuple[jax_core.ClosedJaxpr, int, int]:
  """Returns a scan's body, its number of constants and of carried values.

  Args:
    params: parameters of the scan's equation.
  """
  body = closed_jaxpr(params["jaxpr"])
  if "num_consts" in params:
    return body, params["num_consts"], params["num_carry"]
  consts, carry, _ = params["ft_in"].unpack()  # From JAX 0.11 on.
  return body, len(consts.vals), len(carry.vals)


def to_varying(
  tree: _types.PyTree, axis_name: _types.AxisName
) -> _types.PyTree:
  """Types every leaf as varying over the axis; the elements do not change.

  Without this cast, `jax.grad` with respect to replicated parameters inserts
  an uncompressed psum of the gradient.

  Args:
    tree: pytree of arrays.
    axis_name: a bound axis, or several.

  Returns:
    The same pytree.
  """

  def cast_leaf(x: Any) -> Any:
    missing = set(axis_names(axis_name)) - varying_axes(x)
    missing &= _mapped_axes()
    # In the order of `axis_name`: a set's order differs between processes.
    names = tuple(a for a in axis_names(axis_name) if a in missing)
    return lax.pcast(x, names, to="varying") if names else x

  return jax.tree.map(cast_leaf, tree)


def to_varying_like(
  tree: _types.PyTree, like: _types.PyTree, axis_name: _types.AxisName
) -> _types.PyTree:
  """Types reduced leaves as what they were made of, but for the workers' axes.

  Branches must return values of one type. An empty array may depend on nothing,
  and one that travels beside others is typed as they are.

  Args:
    tree: results of a reduction over the axis.
    like: what was reduced.
    axis_name: the workers' axis, or several.
  """
  axes = frozenset().union(*map(varying_axes, jax.tree.leaves(like)))
  others = tuple(sorted(axes - set(axis_names(axis_name)), key=str))
  return to_varying(tree, others) if others else tree


def gather_replicated(
  x: _types.Array,
  axis_name: _types.AxisName,
  axis: int = 0,
  *,
  tiled: bool = False,
) -> _types.Array:
  """Returns every worker's array, typed as equal on all workers.

  Args:
    x: this worker's array.
    axis_name: a bound axis, or several.
    axis: position of the workers' axis in the result.
    tiled: whether to concatenate along that axis.
  """
  # In `vmap` there are no such types, and JAX refuses to be asked for one.
  to = "invarying" if set(axis_names(axis_name)) & _mapped_axes() else "varying"
  return lax.all_gather(x, axis_name, axis=axis, tiled=tiled, to=to)


def _mapped_axes() -> set[Any]:
  """Returns the axes of enclosing maps over devices; `vmap` adds none."""
  return set(jax.sharding.get_abstract_mesh().manual_axes)


@functools.cache
def _replicated_primitive() -> jax_core.Primitive:
  """Returns the primitive that changes the type of a value and no bit of it."""
  primitive = jax_core.Primitive("assert_replicated")
  primitive.def_impl(lambda x, axes: x)
  primitive.def_abstract_eval(_replicated_type)
  mlir.register_lowering(primitive, lambda ctx, x, axes: [x])
  batching.defvectorized(primitive)
  return primitive


def _replicated_type(x: Any, axes: tuple[Any, ...]) -> Any:
  kind = x.manual_axis_type
  return x.update(
    manual_axis_type=kind.update(varying=kind.varying - set(axes))
  )


def assert_replicated(
  tree: _types.PyTree, axis_name: _types.AxisName
) -> _types.PyTree:
  """Types every leaf as replicated over the axis; the caller guarantees it.

  JAX knows that the result of `all_gather` is replicated. A gather that is
  built from other collectives needs this assertion.

  Args:
    tree: pytree of arrays that have the same bits on every worker.
    axis_name: a bound axis, or several.
  """
  axes = axis_names(axis_name)
  bind = _replicated_primitive().bind
  return jax.tree.map(lambda x: bind(x, axes=axes), tree)
