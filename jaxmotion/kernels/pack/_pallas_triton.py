"""Bit packing as Triton kernels.

A tile is the same few columns of every plane, and so has all codes of its
words: each code is read once and each word written once.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array
from jaxmotion.kernels import _triton
from jaxmotion.kernels.pack import _reference

# Columns per tile.
_WIDTH = 512


def pack_flat(codes: Array, *, bits: int) -> Array:
  """Packs codes of any shape with one kernel."""
  _check_bits(bits)
  size = codes.size
  columns = math.ceil(size / _reference.num_planes(bits))
  width = _tile_width(columns)

  def kernel(codes_ref: Any, words_ref: Any) -> None:
    """Packs the codes of some columns of every plane."""
    index, inside = _column_index(
      0, _reference.num_planes(bits), columns, width, size
    )
    codes = _triton.load(codes_ref, index, inside).astype(jnp.uint32)
    for row, piece in enumerate(_reference.pack_tile(codes, bits)):
      index, inside = _column_index(row, 1, columns, width)
      _triton.store(words_ref, index, piece, inside)

  words = jax.ShapeDtypeStruct(
    (_reference.word_rows(bits), columns), jnp.uint32
  )
  return _call_tiles(kernel, f"pack{bits}", columns, codes, words)


def unpack_flat(words: Array, *, bits: int, size: int, dtype: str) -> Array:
  """Unpacks words to a vector of codes with one kernel."""
  _check_bits(bits)
  rows = _reference.word_rows(bits)
  columns = words.size // rows
  width = _tile_width(columns)

  def kernel(words_ref: Any, codes_ref: Any) -> None:
    """Unpacks the words of some columns to codes of every plane."""
    pieces = [
      _triton.load(words_ref, *_column_index(row, 1, columns, width))
      for row in range(rows)
    ]
    index, inside = _column_index(
      0, _reference.num_planes(bits), columns, width, size
    )
    _triton.store(
      codes_ref, index, _reference.unpack_tile(pieces, bits), inside
    )

  codes = jax.ShapeDtypeStruct((size,), jnp.dtype(dtype))
  return _call_tiles(kernel, f"unpack{bits}", columns, words, codes)


def _check_bits(bits: int) -> None:
  """Raises for a width that XLA packs without a kernel of its own."""
  # A width of one field is read once by XLA, too, which joins that pass with
  # those before and after. Top-k, of whole bytes, launches a third less so.
  if bits in (8, 16, 32):
    raise NotImplementedError("whole bytes are part of another pass")


def _tile_width(columns: int) -> int:
  return min(_WIDTH, _triton.power_of_two(max(1, columns)))


def _call_tiles(
  kernel: Any, name: str, columns: int, x: Array, out: jax.ShapeDtypeStruct
) -> Array:
  width = _tile_width(columns)
  # `pack_tile` wants 4 columns per thread: as many threads as for 4 planes.
  tiles, tile_elements = -(-columns // width), 4 * width
  return _triton.call_kernel(kernel, name, tiles, tile_elements, [x], out)


def _column_index(
  first: int, rows: int, columns: int, width: int, size: int | None = None
) -> tuple[Array, Array | None]:
  """Returns the flat indices of a tile's columns in some rows, and a mask."""
  shape = rows, 1, width
  row = lax.broadcasted_iota(jnp.int32, shape, 0) + first
  column = lax.broadcasted_iota(jnp.int32, shape, 2)
  column = column + _triton.tile_index() * width
  index = row * columns + column
  inside = _triton.inside_limit(column, columns, width)
  if size is not None and size < rows * columns:
    inside = _triton.join_masks(inside, index < size)
  return index, inside
