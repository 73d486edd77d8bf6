"""Narrower floats and leading bytes as Triton kernels.

A kernel applies the reference to a tile of values.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels._error_memory import UNROLL_IN_KERNEL, add_in_order
from jaxmotion.kernels._triton import (
  call_kernel,
  load,
  power_of_two,
  run_if,
  store,
  tile_index,
)
from jaxmotion.kernels.narrow import _reference

# 16 values a thread: a vector of bytes, several of floats in flight.
_TILE = 4096


def cast_encode(x: Array, *, dtype: str, interpret: bool = False) -> Array:
  """See `_api`."""
  encode = functools.partial(_reference.cast_encode, dtype=dtype)
  return _map(encode, f"encode_{dtype}", x, interpret=interpret)


def cast_decode(
  words: Array, *, like: ShapedLike, dtype: str, interpret: bool = False
) -> Array:
  """See `_api`."""
  decode = _of_tile(_reference.cast_decode, like, dtype=dtype)
  return _map(decode, f"decode_{dtype}", words, interpret=interpret)


def cast_sum(
  words: Array, *, like: ShapedLike, dtype: str, interpret: bool = False
) -> Array:
  """See `_api`."""
  decode = _of_tile(_reference.cast_decode, like, dtype=dtype)
  return _map(
    decode, f"sum_{dtype}", words, workers=words.shape[0], interpret=interpret
  )


def truncate_encode(
  x: Array, *, bytes: int, rounding: str, interpret: bool = False
) -> tuple[Array, ...]:
  """See `_api`."""
  encode = functools.partial(
    _reference.truncate_encode, bytes=bytes, rounding=rounding
  )
  return _map(encode, f"truncate{bytes}_{rounding}", x, interpret=interpret)


def truncate_decode(
  planes: tuple[Array, ...], *, like: ShapedLike, interpret: bool = False
) -> Array:
  """See `_api`."""
  decode = _of_tile(_reference.truncate_decode, like)
  return _map(decode, f"extend{len(planes)}", planes, interpret=interpret)


def truncate_sum(
  planes: tuple[Array, ...], *, like: ShapedLike, interpret: bool = False
) -> Array:
  """See `_api`."""
  decode = _of_tile(_reference.truncate_decode, like)
  return _map(
    decode,
    f"sum{len(planes)}",
    planes,
    workers=planes[0].shape[0],
    interpret=interpret,
  )


def _of_tile(
  decode: Callable[..., Array], like: ShapedLike, **static: Any
) -> Callable[[PyTree], Array]:
  """`decode`, into the shape of the words instead of that of `like`."""

  def fn(words: PyTree) -> Array:
    shape = jax.tree.leaves(words)[0].shape
    tile = jax.ShapeDtypeStruct(shape, like.dtype)
    return decode(words, like=tile, **static)

  return fn


def _map(
  fn: Callable[[PyTree], PyTree],
  name: str,
  inputs: PyTree,
  *,
  workers: int | None = None,
  interpret: bool = False,
) -> PyTree:
  """Applies a function to every value, a tile at a time.

  Args:
    fn: value by value, from a pytree of arrays to one of the same shape.
    name: of the kernel.
    inputs: pytree of arrays.
    workers: length of the inputs' leading axis; what `fn` makes of each of
      them is added in float32, in their order.
    interpret: see `call`.

  Raises:
    NotImplementedError: values are wider than 32 bits; see also `call`.
  """
  leaves, treedef = jax.tree.flatten(inputs)
  size = leaves[0].size // (workers or 1)
  tile = min(_TILE, power_of_two(max(1, size)))

  def one(inputs: PyTree) -> PyTree:
    if workers is not None:
      inputs = jax.tree.map(lambda a: a[0], inputs)
    return fn(inputs)

  outputs = jax.eval_shape(one, inputs)
  for a in (*leaves, *jax.tree.leaves(outputs)):
    if jnp.dtype(a.dtype).itemsize > 4:
      raise NotImplementedError(f"values must have 32 bits, got {a.dtype}")
  if workers is not None:
    outputs = jax.ShapeDtypeStruct(outputs.shape, jnp.float32)

  tiles = -(-size // tile)

  def kernel(*refs: Any) -> None:
    index = tile_index() * tile + lax.iota(jnp.int32, tile)

    def make(inside: Array | None) -> None:
      def of(worker: Any) -> Any:
        where = index + worker * size
        values = [load(ref, where, inside) for ref in refs[: len(leaves)]]
        return fn(jax.tree.unflatten(treedef, values))

      result = of(0) if workers is None else _add(of, workers)
      targets = refs[len(leaves) :]
      for ref, y in zip(targets, jax.tree.leaves(result), strict=True):
        store(ref, index, y, inside)

    if size % tile == 0:
      make(None)
    else:
      # Masks of any size would narrow the accesses of every tile.
      last = tile_index() == tiles - 1
      run_if(last, lambda: make(index < size))
      run_if(~last, lambda: make(None))

  return call_kernel(
    kernel, name, tiles, tile, leaves, outputs, interpret=interpret
  )


def _add(of: Callable[[Any], Array], workers: int) -> Array:
  one = lambda worker: of(worker).astype(jnp.float32)
  return add_in_order(one, workers, UNROLL_IN_KERNEL)
