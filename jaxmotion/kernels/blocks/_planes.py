"""Evaluates expressions on tiles one plane at a time.

Mosaic GPU has no layout for arrays with an axis of length 1. An expression on a
tile [planes, blocks, width] has many. Scales are [planes, blocks, 1], numbers
of planes are [planes, 1, 1], and words are [1, blocks, width]. Such an
expression is traced here. Each of its operations is applied to every plane
alone, on an array of [blocks, width], of [blocks], or of no axis.

All operations on one plane come before those on the next, so that registers
hold one plane and not all of them.

Numbers that are known while the kernel is traced, such as shifts that depend on
the plane only, stay numbers. They take no instruction of the kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree

# Functions that return the array of each plane, or of all planes if it is one.
Planes = list[Callable[[], Any]]

_REDUCTIONS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
  "reduce_max": (jnp.max, jnp.maximum),
  "reduce_min": (jnp.min, jnp.minimum),
  "reduce_sum": (jnp.sum, jnp.add),
}
# Bits of the exponent of a float32, all of which are 1 in infinity and NaN.
_EXPONENT = np.int32(0x7F800000)


class Argument(NamedTuple):
  """An argument of an expression: its planes, and the array it stands for.

  Attributes:
    planes: the parts of the array.
    like: shape and dtype of the array: [planes, blocks, width or 1], or [].
  """

  planes: Planes
  like: jax.ShapeDtypeStruct


class _Value(NamedTuple):
  """A traced array: its planes, and which axes of the tile it has.

  Attributes:
    planes: one function for each plane, or one for all.
    axes: for each axis of the array, the axis of the tile.
    partial: for each plane the sum of this and earlier ones, if the value is a
      sum of planes.
  """

  planes: Planes
  axes: tuple[int, ...]
  partial: Planes = []  # noqa: RUF012


class Evaluator:
  """Evaluates functions of tiles one plane at a time."""

  def __init__(
    self, shape: tuple[int, int, int], widen: Callable[[Array], Array]
  ) -> None:
    """Sets the shape of tiles."""
    # `widen`: function from [blocks] to [blocks, width], which repeats
    # elements.
    self._shape, self._widen = shape, widen
    self._values: list[_Value] = []

  def evaluate(
    self,
    fn: Callable[..., PyTree],
    *args: Argument,
    store: Callable[[int, Array], None] | None = None,
  ) -> list[list[Any]]:
    """Returns the arrays of each leaf of a function's result."""
    closed = jax.make_jaxpr(fn)(*(a.like for a in args))
    values = [_Value(a.planes, tuple(range(a.like.ndim))) for a in args]
    found = self._run(closed, values)
    for p in range(self._shape[0]):
      # The compiler moves no load before a store, which may be to the same
      # memory. What the next plane needs is therefore loaded first.
      for argument in args:
        for part in argument.planes[p : p + 2]:
          part()
      for value in self._values:
        parts = value.partial or value.planes
        if len(parts) > 1:
          parts[p]()
      if store is not None:
        store(p, found[0].planes[p]())
    rest = found if store is None else found[1:]
    return [[part() for part in value.planes] for value in rest]

  def _run(self, closed: Any, args: Sequence[_Value]) -> list[_Value]:
    values: dict[Any, _Value] = {}

    def read(atom: Any) -> _Value:
      if isinstance(atom, core.jax_core.Literal):
        aval: Any = atom.aval
        return _constant(np.asarray(atom.val, aval.dtype))
      return values[atom]

    jaxpr = closed.jaxpr
    values.update(
      zip(jaxpr.constvars, map(_constant, closed.consts), strict=True)
    )
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
      found = self._apply(eqn, [read(a) for a in eqn.invars])
      self._values += found
      values.update(zip(eqn.outvars, found, strict=True))
    return [read(a) for a in jaxpr.outvars]

  def _apply(self, eqn: Any, args: list[_Value]) -> list[_Value]:
    name, params = eqn.primitive.name, eqn.params
    if name == "jit":
      return self._run(params["jaxpr"], args)
    if name == "iota":
      return [_number_planes(params)]
    if name in _REDUCTIONS:
      return [self._reduce(name, params["axes"], args[0])]
    if name == "broadcast_in_dim":
      return [_add_axes(params, args[0])]
    if any(v.axes not in ((), (0, 1, 2)) for v in args):
      raise NotImplementedError(f"`{name}` of values without some axes")
    if eqn.outvars[0].aval.shape != np.broadcast_shapes(
      *(a.aval.shape for a in eqn.invars)
    ):
      raise NotImplementedError(f"`{name}` moves elements of a tile")

    def apply_to(p: int) -> Any:
      parts = [v.planes[p if len(v.planes) > 1 else 0]() for v in args]
      return self._bind(eqn, parts)

    count = max(len(v.planes) for v in args)
    planes = [remember(apply_to, p) for p in range(count)]
    return [_Value(planes, max((v.axes for v in args), key=len))]

  def _bind(self, eqn: Any, parts: list[Any]) -> Any:
    """Applies an elementwise operation to arrays of one plane."""
    name = eqn.primitive.name
    if all(isinstance(a, np.generic) for a in parts):
      with jax.ensure_compile_time_eval():
        return np.asarray(eqn.primitive.bind(*parts, **eqn.params))[()]
    if name == "select_n" and isinstance(parts[0], np.generic):
      return parts[1 + int(parts[0])]
    rank = max(np.ndim(a) for a in parts)
    parts = [self._expand(a, rank) for a in parts]
    if name == "is_finite":
      # Mosaic GPU has no such operation.
      bits = lax.bitcast_convert_type(parts[0], jnp.int32)
      return (bits & _EXPONENT) != _EXPONENT
    return eqn.primitive.bind(*parts, **eqn.params)

  def _expand(self, a: Any, rank: int) -> Any:
    if np.ndim(a) == 0:
      return jnp.broadcast_to(a, self._shape[1 : 1 + rank])
    return self._widen(a) if np.ndim(a) < rank else a

  def _reduce(self, name: str, axes: tuple[int, ...], a: _Value) -> _Value:
    within, across = _REDUCTIONS[name]
    if a.axes == (0, 1, 2) and axes == (2,):
      reduce = lambda part: within(self._expand(part(), 2), axis=1)
      return _Value([remember(reduce, part) for part in a.planes], (0, 1))
    if a.axes == (0, 1, 2) and axes == (0,) and len(a.planes) > 1:
      combine = lambda total, part: across(total(), part())
      totals = [a.planes[0]]
      for part in a.planes[1:]:
        totals.append(remember(combine, totals[-1], part))
      return _Value(totals[-1:], (1, 2), totals)
    raise NotImplementedError(f"`{name}` along axes {axes}")


def remember(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
  """Returns a function that calls another one once and returns its result."""
  return functools.cache(functools.partial(fn, *args))


def _constant(a: Any) -> _Value:
  return _Value([lambda: np.asarray(a)[()]], ())


def _number_planes(params: Any) -> _Value:
  shape, axis = params["shape"], params["dimension"]
  if axis or shape[1:] != (1, 1):
    raise NotImplementedError("`iota` along blocks or elements")
  numbers = np.arange(shape[0], dtype=params["dtype"])
  return _Value([remember(lambda n: n, n) for n in numbers], (0, 1, 2))


def _add_axes(params: Any, a: _Value) -> _Value:
  if len(params["shape"]) != 3 or params["broadcast_dimensions"] != a.axes:
    raise NotImplementedError("`broadcast_in_dim` to another tile")
  return a._replace(axes=(0, 1, 2))
