"""Bit packing into 32-bit words in planes, as `jax.numpy`.

A flat array of n codes is divided into P planes, contiguous runs of n / P
codes. Word j holds code j of every plane, plane i in bits [i * f, (i + 1) * f).
Packing and unpacking are then shifts of whole contiguous rows: no strided
access, no gather. A width that is no power of two is split into widths that
are (3 = 2 + 1), each packed into words of its own.
"""

import functools
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array
from jaxmotion.kernels import _block_layout

# Planes added by one sum, and by one sum of 32 planes: see `sum_planes`.
_MAX_SUM, _MAX_SUM_OF_MANY = 4, 8


@functools.cache
@core.declare(bits=core.integer(1, 32))
def field_widths(bits: int) -> tuple[int, ...]:
  """Splits a width into powers of two, widest first.

  >>> field_widths(7), field_widths(8)
  ((4, 2, 1), (8,))
  """
  return tuple(f for f in (32, 16, 8, 4, 2, 1) if bits & f)


@functools.cache
def num_planes(bits: int) -> int:
  """Returns the number of planes that codes of this width are divided into.

  >>> num_planes(8), num_planes(4), num_planes(3)
  (4, 8, 32)
  """
  return 32 // min(field_widths(bits))


def word_rows(bits: int) -> int:
  """Returns the number of words that hold one code of every plane.

  >>> word_rows(6), word_rows(8)
  (3, 1)
  """
  return num_planes(bits) * bits // 32


def pack(codes: Array, bits: int, *, follows_blocks: bool = True) -> Array:
  """Packs codes uint32[P, ...] by the form that is fastest for their width."""
  if bits == min(field_widths(bits)):
    most = _MAX_SUM if follows_blocks else _MAX_SUM_OF_MANY
    return sum_planes(codes << _field_shifts(codes, bits), most)[None]
  return _pack_mixed(codes, bits) if bits < 16 else _pack_fields(codes, bits)


def pack_cut(codes: Sequence[tuple[slice, Array]], bits: int) -> Array:
  """Packs codes of all planes, some planes at a time, as `cut_planes` cuts.

  >>> ones = jnp.ones((2, 3), jnp.uint32)
  >>> words = pack_cut([(slice(0, 2), ones), (slice(2, 4), ones)], 8)
  >>> hex(words[0, 0])
  '0x1010101'
  """
  if len(codes) == 1:
    return pack(codes[0][1], bits)
  sums = [
    sum_planes(part << (_field_shifts(part, bits) + np.uint32(s.start * bits)))
    for s, part in codes
  ]
  return functools.reduce(jnp.add, sums)[None]


def _pack_fields(codes: Array, bits: int) -> Array:
  """Packs codes that are in memory already, with one sum per field."""
  rows, low = [], 0
  for f in reversed(field_widths(bits)):
    field = (codes >> low) & jnp.uint32(2**f - 1)
    field = field.reshape(codes.shape[0] * f // 32, 32 // f, *codes.shape[1:])
    shifts = _field_shifts(field, f, axis=1)
    rows.append(jnp.sum(field << shifts, axis=1, dtype=jnp.uint32))
    low += f
  return jnp.concatenate(rows)


def sum_planes(terms: Array, at_once: int = _MAX_SUM) -> Array:
  """Returns the sum of uint32[P, ...] over the planes, modulo 2**32.

  >>> sum_planes(jnp.ones((20, 2), jnp.uint32)).tolist()
  [20, 20]
  """
  # A sum over the leading axis takes the computation of the terms into its own
  # loop. XLA:CPU writes all terms to memory first if slices are or-ed one by
  # one, or if a sum is over more than some planes (6x). Sums of four planes
  # take half of the time of sums of eight where blocks are padded, but 32
  # planes would be too many sums.
  count = terms.shape[0]
  most = _MAX_SUM_OF_MANY if count >= 32 else at_once
  sums = [
    lax.reduce_sum(lax.slice_in_dim(terms, i, min(i + most, count)), (0,))
    for i in range(0, count, most)
  ]
  return functools.reduce(jnp.add, sums)


def _pack_mixed(codes: Array, bits: int) -> Array:
  """Packs codes through words that hold whole codes of several planes."""
  # One sum then reads the expression that computes the codes, once. Otherwise
  # XLA:CPU would recompute it for each field, without vectors (7x slower at 6
  # bits).
  count, most = codes.shape[0], 32 // bits
  per = 2 ** (most.bit_length() - 1)
  groups = codes.reshape(count // per, per, *codes.shape[1:])
  whole = jnp.sum(
    groups << _field_shifts(groups, bits, axis=1), axis=1, dtype=jnp.uint32
  )
  rows, low = [], 0
  for f in reversed(field_widths(bits)):
    for start in range(0, count, 32 // f):
      parts = []
      for i in range(32 // f):
        group, place = divmod(start + i, per)
        part = (whole[group] >> (place * bits + low)) & jnp.uint32(2**f - 1)
        parts.append(part << (i * f))
      rows.append(functools.reduce(jnp.bitwise_or, parts))
    low += f
  return jnp.stack(rows)


def unpack(words: Array, bits: int) -> Array:
  """Returns the codes of packed words, uint32[P, ...]."""
  codes: Array | None = None
  row, low = 0, 0
  # The compiler looks through concatenations before it looks at products, but
  # through broadcasts later. Products with weights that are sharded would
  # decide how the codes are partitioned, and these would be moved.
  joins = core.is_compiler_partitioned(words)
  for f in reversed(field_widths(bits)):
    count, per = num_planes(bits) * f // 32, 32 // f
    rows = words
    if count < words.shape[0]:
      rows = lax.slice_in_dim(words, row, row + count)
    if per == 1:
      field = rows
    else:
      shape = (count, per, *rows.shape[1:])
      spread = (
        lax.concatenate([lax.expand_dims(rows, (1,))] * per, 1)
        if joins
        else lax.broadcast_in_dim(rows, shape, (0, *range(2, len(shape))))
      )
      field = spread >> _field_shifts(spread, f, axis=1)
      field = field & np.uint32(2**f - 1)
      field = field.reshape(count * per, *rows.shape[1:])
    row += count
    codes = field if codes is None else codes | (field << low)
    low += f
  assert codes is not None
  return codes


def _field_shifts(like: Array, f: int, axis: int = 0) -> Array:
  """Returns how far the fields along an axis are moved."""
  shape = [1] * like.ndim
  shape[axis] = like.shape[axis]
  return lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(f)


def unpack_to_float(words: Array, bits: int) -> Array:
  """Returns the codes of packed words as float32[P, ...]."""
  # Through int32: XLA:CPU converts uint32 to float without vectors.
  return unpack(words, bits).astype(jnp.int32).astype(jnp.float32)


def pack_flat(codes: Array, bits: int) -> Array:
  """Packs codes of any shape; zeros fill the last column."""
  count = num_planes(bits)
  flat = _block_layout.pad_to_multiple(codes.reshape(-1), count)
  return _pack_fields(flat.reshape(count, -1).astype(jnp.uint32), bits)


def unpack_flat(
  words: Array, bits: int, size: int, dtype: str = "uint32"
) -> Array:
  """Returns the first `size` codes of packed words."""
  return unpack(words, bits).reshape(-1)[:size].astype(dtype)


def pack_tile(codes: Array, bits: int) -> list[Array]:
  """Packs codes uint32[P, G, W] inside a kernel, to uint32[1, G, W] a row."""
  # Every row is a sum over all planes in which the planes of other rows are
  # zeros. The zeros cost no work. A thread that holds all planes of its columns
  # knows each plane's number at compile time, so zeros and shifts are
  # constants. Reshaping the planes to (rows, planes per row) instead makes
  # threads exchange them. It is fastest if threads hold 4 columns of all planes
  # each, that is with at most G * W / 4 threads.
  pieces = []
  for low, f, shift, mine in _row_fields(bits):
    field = codes >> low if low else codes
    if low + f < bits:
      field = field & jnp.uint32(2**f - 1)
    field = field << shift
    if mine is not None:
      field = jnp.where(mine, field, jnp.uint32(0))
    pieces.append(sum_words(field))
  return pieces


def unpack_tile(pieces: Sequence[Array], bits: int) -> Array:
  """Returns the codes, uint32[P, G, W], that `pack_tile` packed."""
  codes: Array | None = None
  fields = _row_fields(bits)
  for piece, (low, f, shift, mine) in zip(pieces, fields, strict=True):
    field = piece >> shift
    if f < 32:
      field = field & jnp.uint32(2**f - 1)
    if mine is not None:
      field = jnp.where(mine, field, jnp.uint32(0))
    field = field << low if low else field
    codes = field if codes is None else codes | field
  assert codes is not None
  return codes


def unpack_tile_to_float(pieces: Sequence[Array], bits: int) -> Array:
  """Returns the codes that `pack_tile` packed as float32[P, G, W]."""
  return unpack_tile(pieces, bits).astype(jnp.int32).astype(jnp.float32)


def _row_fields(bits: int) -> Iterator[tuple[int, int, Array, Array | None]]:
  """Yields the positions of the codes in each row of words."""
  # For each row the lowest bit of its field in a code, and the field's width.
  # Then the shift of each plane's field in a word, and whether the plane
  # belongs to this row (None if all do). The last two have shape [P, 1, 1].
  count, low = num_planes(bits), 0
  plane = lax.broadcasted_iota(jnp.uint32, (count, 1, 1), 0)
  for f in reversed(field_widths(bits)):
    per = 32 // f
    for group in range(count // per):
      mine = plane // per == group if per < count else None
      place = plane % per if per < count else plane
      yield low, f, place * f, mine
    low += f


def mul_high(a: Array, b: Array) -> Array:
  """Returns floor(a * b / 2**32), the high word of a product of words.

  If `a` is uniform over all words, the result is uniform over 0 .. b - 1, up to
  a share of at most b / 2**32.

  >>> int(mul_high(jnp.uint32(0x80000000), jnp.uint32(6)))
  3
  """
  low = jnp.uint32(0xFFFF)
  a_high, a_low = a >> 16, a & low
  b_high, b_low = b >> 16, b & low
  cross = a_high * b_low + (a_low * b_low >> 16)
  other = a_low * b_high + (cross & low)
  return a_high * b_high + (cross >> 16) + (other >> 16)


def sum_words(words: Array) -> Array:
  """Returns the sum of uint32[P, ...] words modulo 2**32, uint32[1, ...].

  >>> sum_words(jnp.uint32([[2**31, 1], [2**31, 2]])).tolist()
  [[0, 3]]
  """
  # Signed integers are added, whose sums have the same bits: not every kernel
  # adds unsigned ones.
  signed = lax.bitcast_convert_type(words, jnp.int32)
  total = jnp.sum(signed, axis=0, keepdims=True, dtype=jnp.int32)
  return lax.bitcast_convert_type(total, jnp.uint32)
