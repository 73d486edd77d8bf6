"""Bit packing into 32-bit words in planes, as `jax.numpy`.

A flat array of n codes is divided into P planes, contiguous runs of n / P
codes. Word j holds code j of every plane, plane i in bits [i * f, (i + 1) * f).
Packing and unpacking are then shifts of whole contiguous rows: no strided
access, no gather. A width that is no power of two is split into widths that
are (3 = 2 + 1), each packed into words of its own.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array

# Planes added by one sum, and by one sum of 32 planes: see `sum_planes`.
_MAX_SUM, _MAX_SUM_OF_MANY = 4, 8


@functools.cache
def field_widths(bits: int) -> tuple[int, ...]:
  """Splits a width into powers of two, widest first.

  >>> field_widths(7), field_widths(8)
  ((4, 2, 1), (8,))
  """
  core.check_int("bits", bits, 1, 32)
  return tuple(f for f in (32, 16, 8, 4, 2, 1) if bits & f)


@functools.cache
def num_planes(bits: int) -> int:
  """Returns the number of planes that codes of this width are divided into.

  >>> num_planes(8), num_planes(4), num_planes(3)
  (4, 8, 32)
  """
  return 32 // min(field_widths(bits))


def pack(codes: Array, bits: int, *, follows_blocks: bool = True) -> Array:
  """Packs codes uint32[P, ...] by the form that is fastest for their width."""
  if bits == min(field_widths(bits)):
    most = _MAX_SUM if follows_blocks else _MAX_SUM_OF_MANY
    return sum_planes(codes << _field_shifts(codes, bits), most)[None]
  return _pack_mixed(codes, bits) if bits < 16 else _pack_fields(codes, bits)


def pack_cut(codes: Sequence[tuple[slice, Array]], bits: int) -> Array:
  """Packs codes of all planes, some planes at a time.

  Args:
    codes: numbers of some planes and their codes, as `cut_planes` divides them.
    bits: width of a code, a power of two if the planes are divided.

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

  A sum over the leading axis takes the computation of the terms into its own
  loop. XLA:CPU writes all terms to memory first if slices are or-ed one by one,
  or if a sum is over more than some planes (6x). Sums of four planes take half
  of the time of sums of eight where blocks are padded, but 32 planes would be
  too many sums.

  Args:
    terms: a term of every plane.
    at_once: planes that one sum adds, if there are fewer than 32.

  >>> sum_planes(jnp.ones((20, 2), jnp.uint32)).tolist()
  [20, 20]
  """
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
  flat = codes.reshape(-1)
  padding = -codes.size % count
  flat = jnp.pad(flat, (0, padding)) if padding else flat
  return _pack_fields(flat.reshape(count, -1), bits)


def unpack_flat(words: Array, bits: int, size: int) -> Array:
  """Returns the first `size` codes of packed words, uint32[size]."""
  return unpack(words, bits).reshape(-1)[:size]
