"""Packing inside a kernel: what lowers there, reshapes and sums."""

from collections.abc import Sequence

from jaxmotion.core import Array
from jaxmotion.kernels.pack._reference import (
  fields,
  pack_field,
  planes,
  unpack_field,
)


def pack_tile(codes: Array, bits: int) -> list[tuple[int, Array]]:
  """Packs the codes of a tile, one array of words a field.

  Args:
    codes: uint32[P, G, W] with P = `planes(bits)`, each below 2**bits.
    bits: width of a code, 1 to 32.

  Returns:
    (first row, uint32[rows, G, W]) of each field, narrowest first: the rows
    of `pack(codes, bits)` that the field fills, a power of two of them.
  """
  pieces, row, low = [], 0, 0
  for f in reversed(fields(bits)):
    piece = pack_field(codes, low, f)
    pieces.append((row, piece))
    row += piece.shape[0]
    low += f
  return pieces


def piece_rows(bits: int) -> list[tuple[int, int]]:
  """Returns (first row, rows) of each field, as `pack_tile` orders them.

  >>> piece_rows(6), piece_rows(8)
  ([(0, 1), (1, 2)], [(0, 1)])
  """
  rows = [planes(bits) * f // 32 for f in reversed(fields(bits))]
  return [(sum(rows[:i]), n) for i, n in enumerate(rows)]


def unpack_tile(pieces: Sequence[Array], bits: int) -> Array:
  """Inverts `pack_tile`.

  Args:
    pieces: uint32[rows, G, W] of each field, in the same order.
    bits: width of a code, 1 to 32.

  Returns:
    uint32[P, G, W].
  """
  codes: Array | None = None
  low = 0
  for f, words in zip(reversed(fields(bits)), pieces, strict=True):
    field = unpack_field(words, f) << low
    codes = field if codes is None else codes | field
    low += f
  assert codes is not None
  return codes
