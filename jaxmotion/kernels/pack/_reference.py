"""Bit fields into 32-bit words, planar.

A flat array of n codes is cut into P planes, contiguous runs of n / P codes.
Word j holds code j of every plane, plane i in bits [i * f, (i + 1) * f), so
packing and unpacking are shifts of whole contiguous rows: no strided access,
no gather. A width that is no power of two is split into ones that are
(3 = 2 + 1), each packed into words of its own.
"""

from collections.abc import Sequence
from functools import reduce

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, check_int

# Planes added by one sum.
_SUM_MOST = 8


def field_widths(bits: int) -> tuple[int, ...]:
  """Splits a width into powers of two, widest first.

  >>> field_widths(7), field_widths(8)
  ((4, 2, 1), (8,))
  """
  check_int("bits", bits, 1, 32)
  return tuple(f for f in (32, 16, 8, 4, 2, 1) if bits & f)


def num_planes(bits: int) -> int:
  """Returns how many planes codes of this width are cut into.

  >>> num_planes(8), num_planes(4), num_planes(3)
  (4, 8, 32)
  """
  return 32 // min(field_widths(bits))


def pack(codes: Array, bits: int) -> Array:
  """See `_api`."""
  if bits == min(field_widths(bits)):
    return _pack_word(codes, bits)[None]
  return _pack_mixed(codes, bits) if bits < 16 else _pack_fields(codes, bits)


def _pack_fields(codes: Array, bits: int) -> Array:
  """Packs codes that are in memory already: one sum a field."""
  rows, low = [], 0
  for f in reversed(field_widths(bits)):
    field = (codes >> low) & jnp.uint32(2**f - 1)
    field = field.reshape(codes.shape[0] * f // 32, 32 // f, *codes.shape[1:])
    shifts = _shifts(field[0], f)[None]
    rows.append(jnp.sum(field << shifts, axis=1, dtype=jnp.uint32))
    low += f
  return jnp.concatenate(rows)


def _pack_word(field: Array, f: int) -> Array:
  # A sum over the leading axis takes the codes' computation into its own loop;
  # or-ing slices one by one makes XLA:CPU write all codes to memory first, and
  # so does a sum over more than some planes (6x).
  shifted = field << _shifts(field, f)
  sums = [
    jnp.sum(shifted[i : i + _SUM_MOST], axis=0, dtype=jnp.uint32)
    for i in range(0, field.shape[0], _SUM_MOST)
  ]
  return reduce(jnp.bitwise_or, sums)


def _pack_mixed(codes: Array, bits: int) -> Array:
  """Packs by way of words that hold whole codes of several planes.

  One sum then reads what computes the codes, once; XLA:CPU would compute them
  anew for each field, and without vectors (7x slower, 6 bits).
  """
  count, most = codes.shape[0], 32 // bits
  per = 2 ** (most.bit_length() - 1)
  groups = codes.reshape(count // per, per, *codes.shape[1:])
  whole = jnp.sum(
    groups << _shifts(groups[0], bits)[None], axis=1, dtype=jnp.uint32
  )
  rows, low = [], 0
  for f in reversed(field_widths(bits)):
    for start in range(0, count, 32 // f):
      parts = []
      for i in range(32 // f):
        group, place = divmod(start + i, per)
        part = (whole[group] >> (place * bits + low)) & jnp.uint32(2**f - 1)
        parts.append(part << (i * f))
      rows.append(reduce(jnp.bitwise_or, parts))
    low += f
  return jnp.stack(rows)


def unpack(words: Array, bits: int) -> Array:
  """See `_api`."""
  codes: Array | None = None
  row, low = 0, 0
  for f in reversed(field_widths(bits)):
    count = num_planes(bits) * f // 32
    field = _unpack_field(words[row : row + count], f)
    row += count
    codes = field << low if codes is None else codes | (field << low)
    low += f
  assert codes is not None
  return codes


def _unpack_field(words: Array, f: int) -> Array:
  """uint32[rows, ...] -> uint32[rows * 32 / f, ...]."""
  if f == 32:
    return words
  spread = jnp.broadcast_to(
    words[:, None], (words.shape[0], 32 // f, *words.shape[1:])
  )
  codes = (spread >> _shifts(spread[0], f)[None]) & jnp.uint32(2**f - 1)
  return codes.reshape(words.shape[0] * (32 // f), *words.shape[1:])


def _shifts(field: Array, f: int) -> Array:
  shape: Sequence[int] = (field.shape[0],) + (1,) * (field.ndim - 1)
  return (lax.iota(jnp.uint32, field.shape[0]) * jnp.uint32(f)).reshape(shape)


def unpack_to_float(words: Array, bits: int) -> Array:
  """Inverts `pack`, to float32: f32[P, ...]."""
  # By way of int32: XLA:CPU converts uint32 to float without vectors.
  return unpack(words, bits).astype(jnp.int32).astype(jnp.float32)


def pack_flat(codes: Array, bits: int) -> Array:
  """See `_api`."""
  count = num_planes(bits)
  flat = codes.reshape(-1)
  padding = -codes.size % count
  flat = jnp.pad(flat, (0, padding)) if padding else flat
  return _pack_fields(flat.reshape(count, -1), bits)


def unpack_flat(words: Array, bits: int, size: int) -> Array:
  """See `_api`."""
  return unpack(words, bits).reshape(-1)[:size]
