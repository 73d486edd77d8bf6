"""Bit packing inside a kernel, one row of words at a time.

Every row is a sum over all planes in which the planes of other rows are zeros.
The zeros cost no work. A thread that holds all planes of its columns knows each
plane's number at compile time, so zeros and shifts are constants. Reshaping the
planes to (rows, planes per row) instead makes threads exchange them.
"""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array
from jaxmotion.kernels import _words
from jaxmotion.kernels.pack import _reference


def pack_tile(codes: Array, bits: int) -> list[tuple[int, Array]]:
  """Packs the codes of a tile into one array per row of words.

  It is fastest if threads hold 4 columns of all planes each, that is with at
  most G * W / 4 threads.

  Args:
    codes: uint32[P, G, W] with P = `num_planes(bits)`, each below 2**bits.
    bits: width of a code, 1 to 32.

  Returns:
    (row, uint32[1, G, W]) for every row of `pack(codes, bits)`, in order.
  """
  pieces = []
  for row, low, f, shift, mine in _row_fields(bits):
    field = codes >> low if low else codes
    if low + f < bits:
      field = field & jnp.uint32(2**f - 1)
    field = field << shift
    if mine is not None:
      field = jnp.where(mine, field, jnp.uint32(0))
    pieces.append((row, _words.sum_words(field, axis=0)))
  return pieces


def piece_rows(bits: int) -> list[tuple[int, int]]:
  """Returns (first row, rows) of each array that `pack_tile` returns.

  >>> piece_rows(6), piece_rows(8)
  ([(0, 1), (1, 1), (2, 1)], [(0, 1)])
  """
  return [(row, 1) for row in range(_reference.num_planes(bits) * bits // 32)]


def unpack_tile(pieces: Sequence[Array], bits: int) -> Array:
  """Returns the codes that `pack_tile` packed.

  Args:
    pieces: uint32[1, G, W] of each row, in order.
    bits: width of a code, 1 to 32.

  Returns:
    uint32[P, G, W].
  """
  codes: Array | None = None
  for row, low, f, shift, mine in _row_fields(bits):
    field = pieces[row] >> shift
    if f < 32:
      field = field & jnp.uint32(2**f - 1)
    if mine is not None:
      field = jnp.where(mine, field, jnp.uint32(0))
    field = field << low if low else field
    codes = field if codes is None else codes | field
  assert codes is not None
  return codes


def _row_fields(
  bits: int,
) -> Iterator[tuple[int, int, int, Array, Array | None]]:
  """Yields the positions of the codes in each row of words."""
  # Yields: The row, the lowest bit of its field in a code, and the field's
  # width. Then the shift of each plane's field in a word, and whether the plane
  # belongs to this row (None if all do). The last two have shape [P, 1, 1].
  count, row, low = _reference.num_planes(bits), 0, 0
  plane = lax.broadcasted_iota(jnp.uint32, (count, 1, 1), 0)
  for f in reversed(_reference.field_widths(bits)):
    per = 32 // f
    for group in range(count // per):
      mine = plane // per == group if per < count else None
      place = plane % per if per < count else plane
      yield row, low, f, place * f, mine
      row += 1
    low += f
