"""Casts and truncations as Triton kernels, elementwise.

A kernel loads a tile, applies the reference to it and stores the result, so the
arithmetic exists once. `_map_tiles` is the only kernel; the functions differ in
what they hand it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _error_memory, _triton
from jaxmotion.kernels.narrow import _reference

# 16 elements per thread: a vector of bytes, several of floats in flight.
_TILE = 4096


def cast_encode(x: Array, *, dtype: str) -> Array:
  """Rounds to a narrower float with one kernel."""
  encode = functools.partial(_reference.cast_encode, dtype=dtype)
  return _map_tiles(encode, f"encode_{dtype}", x)


def cast_decode(words: Array, *, like: ShapedLike, dtype: str) -> Array:
  """Decodes words of narrow floats with one kernel."""
  decode = _decoder_of_tile(_reference.cast_decode, like, dtype=dtype)
  return _map_tiles(decode, f"decode_{dtype}", words)


def cast_sum(words: Array, *, like: ShapedLike, dtype: str) -> Array:
  """Decodes and adds the words of several workers with one kernel."""
  decode = _decoder_of_tile(_reference.cast_decode, like, dtype=dtype)
  return _map_tiles(decode, f"sum_{dtype}", words, workers=words.shape[0])


def truncate_encode(
  x: Array, *, bytes: int, rounding: str
) -> tuple[Array, ...]:
  """Returns the leading bytes of each word with one kernel."""
  encode = functools.partial(
    _reference.truncate_encode, bytes=bytes, rounding=rounding
  )
  return _map_tiles(encode, f"truncate{bytes}_{rounding}", x)


def truncate_decode(planes: tuple[Array, ...], *, like: ShapedLike) -> Array:
  """Joins leading bytes to floats with one kernel."""
  decode = _decoder_of_tile(_reference.truncate_decode, like)
  return _map_tiles(decode, f"extend{len(planes)}", planes)


def truncate_sum(planes: tuple[Array, ...], *, like: ShapedLike) -> Array:
  """Decodes and adds the planes of several workers with one kernel."""
  decode = _decoder_of_tile(_reference.truncate_decode, like)
  return _map_tiles(
    decode, f"sum{len(planes)}", planes, workers=planes[0].shape[0]
  )


def _decoder_of_tile(
  decode: Callable[..., Array], like: ShapedLike, **static: Any
) -> Callable[[PyTree], Array]:
  """Returns `decode` with the shape of its words in place of `like`'s."""

  def decode_tile(words: PyTree) -> Array:
    shape = jax.tree.leaves(words)[0].shape
    tile = jax.ShapeDtypeStruct(shape, like.dtype)
    return decode(words, like=tile, **static)

  return decode_tile


def _map_tiles(
  fn: Callable[[PyTree], PyTree],
  name: str,
  inputs: PyTree,
  *,
  workers: int | None = None,
) -> PyTree:
  """Applies an elementwise function to arrays, one tile per program."""
  leaves, treedef = jax.tree.flatten(inputs)
  size = leaves[0].size // (workers or 1)
  tile = min(_TILE, _triton.power_of_two(max(1, size)))

  def apply_to_one(inputs: PyTree) -> PyTree:
    if workers is not None:
      inputs = jax.tree.map(lambda a: a[0], inputs)
    return fn(inputs)

  outputs = jax.eval_shape(apply_to_one, inputs)
  _triton.reject_wide(*leaves, *jax.tree.leaves(outputs))
  if workers is not None:
    outputs = jax.ShapeDtypeStruct(outputs.shape, jnp.float32)

  tiles = -(-size // tile)

  def kernel(*refs: Any) -> None:
    """Applies the function to one tile, with a mask in the last one alone."""
    index = _triton.tile_index() * tile + lax.iota(jnp.int32, tile)

    def compute_tile(inside: Array | None) -> None:
      """Loads a tile of every input, applies the function and stores."""

      def apply_to_worker(worker: Any) -> Any:
        where = index + worker * size
        values = [
          _triton.load(ref, where, inside) for ref in refs[: len(leaves)]
        ]
        return fn(jax.tree.unflatten(treedef, values))

      if workers is None:
        result = apply_to_worker(0)
      else:
        result = _error_memory.add_in_order(
          lambda worker: apply_to_worker(worker).astype(jnp.float32),
          workers,
          _error_memory.MAX_UNROLL_IN_KERNEL,
        )
      targets = refs[len(leaves) :]
      for ref, y in zip(targets, jax.tree.leaves(result), strict=True):
        _triton.store(ref, index, y, inside)

    if size % tile == 0:
      compute_tile(None)
    else:
      # Only the last tile has a mask: one would narrow the loads and stores of
      # every tile.
      last = _triton.tile_index() == tiles - 1
      _triton.run_if(last, lambda: compute_tile(index < size))
      _triton.run_if(~last, lambda: compute_tile(None))

  return _triton.call_kernel(kernel, name, tiles, tile, leaves, outputs)
