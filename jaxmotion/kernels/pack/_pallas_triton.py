"""Bit fields into words as Triton kernels.

A tile is the same few columns of every plane, and so all codes of its words.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array
from jaxmotion.kernels._triton import (
  call_kernel,
  load,
  power_of_two,
  store,
  tile_index,
)
from jaxmotion.kernels.pack._reference import num_planes
from jaxmotion.kernels.pack._tile import pack_tile, piece_rows, unpack_tile

# Columns of a tile.
_WIDTH = 512


def pack(codes: Array, *, bits: int, interpret: bool = False) -> Array:
  """See `_api`."""
  words = pack_flat(codes, bits=bits, interpret=interpret)
  return words.reshape(-1, *codes.shape[1:])


def unpack(words: Array, *, bits: int, interpret: bool = False) -> Array:
  """See `_api`."""
  size = words.size * 32 // bits
  codes = unpack_flat(words, bits=bits, size=size, interpret=interpret)
  return codes.reshape(-1, *words.shape[1:])


def pack_flat(codes: Array, *, bits: int, interpret: bool = False) -> Array:
  """See `_api`."""
  size = codes.size
  columns = math.ceil(size / num_planes(bits))
  width = _width(columns)

  def kernel(codes_ref: Any, words_ref: Any) -> None:
    index, inside = _spot(0, num_planes(bits), columns, width, size)
    codes = load(codes_ref, index, inside)
    for first, piece in pack_tile(codes, bits):
      index, inside = _spot(first, piece.shape[0], columns, width)
      store(words_ref, index, piece, inside)

  words = jax.ShapeDtypeStruct((len(piece_rows(bits)), columns), jnp.uint32)
  return _call(kernel, f"pack{bits}", columns, codes, words, interpret)


def unpack_flat(
  words: Array, *, bits: int, size: int, interpret: bool = False
) -> Array:
  """See `_api`."""
  columns = words.size // len(piece_rows(bits))
  width = _width(columns)

  def kernel(words_ref: Any, codes_ref: Any) -> None:
    pieces = [
      load(words_ref, *_spot(first, rows, columns, width))
      for first, rows in piece_rows(bits)
    ]
    index, inside = _spot(0, num_planes(bits), columns, width, size)
    store(codes_ref, index, unpack_tile(pieces, bits), inside)

  codes = jax.ShapeDtypeStruct((size,), jnp.uint32)
  return _call(kernel, f"unpack{bits}", columns, words, codes, interpret)


def _width(columns: int) -> int:
  return min(_WIDTH, power_of_two(max(1, columns)))


def _call(
  kernel: Any,
  name: str,
  columns: int,
  x: Array,
  out: jax.ShapeDtypeStruct,
  interpret: bool,
) -> Array:
  width = _width(columns)
  # As many threads as for 4 planes, of which each has 4 columns: `pack_tile`.
  tiles, tile_values = -(-columns // width), 4 * width
  return call_kernel(
    kernel, name, tiles, tile_values, [x], out, interpret=interpret
  )


def _spot(
  first: int, rows: int, columns: int, width: int, size: int | None = None
) -> tuple[Array, Array | None]:
  """Indices of the tile's columns in some rows, and which of them exist."""
  shape = rows, 1, width
  row = lax.broadcasted_iota(jnp.int32, shape, 0) + first
  column = lax.broadcasted_iota(jnp.int32, shape, 2)
  column = column + tile_index() * width
  index = row * columns + column
  inside = column < columns if columns % width else None
  if size is not None and size < rows * columns:
    real = index < size
    inside = real if inside is None else inside & real
  return index, inside
