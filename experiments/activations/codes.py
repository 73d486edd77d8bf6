"""Bytes of an activation under codes that leave zeros out.

Nothing that is compared here has a static shape but `jaxmotion.codecs`' codes:
the others' bytes follow the values, as those of a DMA engine do.
"""

import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import wire
from jaxmotion.codecs import zero_value
from jaxmotion.core import Array

TILE = 1024
_LONGEST = 255  # What a byte can count.


def words(x: np.ndarray) -> np.ndarray:
  """The bits of floats, flat."""
  return np.ascontiguousarray(x).reshape(-1).view(f"u{x.itemsize}")


def run_length_bytes(values: np.ndarray) -> int:
  """Bytes of pairs (zeros, others), a byte each, every pair before its others.

  Args:
    values: words, flat.

  >>> run_length_bytes(np.array([0, 0, 7, 8, 0], np.uint32))  # 2 2 7 8 1 0
  12
  """
  if not values.size:
    return 0
  zero = values == 0
  ends = np.flatnonzero(np.append(zero[1:] != zero[:-1], True)) + 1
  lengths = np.diff(ends, prepend=0)
  first = 0 if zero[0] else 1  # Runs of zeros have the even places.
  lengths = np.concatenate([np.zeros(first, int), lengths, np.zeros(1, int)])
  lengths = lengths[: lengths.size // 2 * 2].reshape(-1, 2)
  # A run of more than a byte counts takes more pairs, the other of which is 0.
  pairs = np.maximum(1, -(-lengths // _LONGEST)).sum(axis=1) - 1
  return int(2 * pairs.sum() + values.itemsize * np.count_nonzero(values))


def zero_value_bytes(values: np.ndarray) -> int:
  """Bytes of a mask for every 32 words, and the words that are not zero.

  This is cDMA's code (ZVC) at words of 32 bits.

  Args:
    values: words, flat.

  >>> zero_value_bytes(np.array([0, 0, 7, 8, 0], np.uint32))
  12
  """
  mask = np.packbits(np.pad(values != 0, (0, -values.size % 32)))
  return mask.nbytes + values[values != 0].nbytes


def entropy_bytes(values: np.ndarray) -> int:
  """Bytes of what zlib makes of the mask and of the words' byte planes.

  The planes are the first bytes of all words that are not zero, then their
  second ones, and so on: exponents compress, what noise is left does not.

  Args:
    values: words, flat.
  """
  kept = values[values != 0]
  planes = kept.view(np.uint8).reshape(-1, kept.itemsize).T
  parts = np.packbits(values != 0), *planes
  return sum(len(zlib.compress(part.tobytes())) for part in parts)


def spread(x: Array) -> Array:
  """Puts values that are far apart into one tile.

  Where there are many values that are not zero, their neighbours are not zero
  either: a tile of neighbours needs much more room than the mean tile, and the
  room is that of the worst. Tiles of values from all over the array are alike.

  Args:
    x: channels last.

  Returns:
    `(tiles, 1024)`; the array's own values, and zeros at the end.
  """
  columns = _columns(x)
  flat = jnp.pad(x.reshape(-1), (0, TILE * columns - x.size))
  return flat.reshape(TILE, columns).T


def unspread(tiles: Array, like: Array) -> Array:
  """Inverts `spread`."""
  return tiles.T.reshape(-1)[: like.size].reshape(like.shape)


def _columns(x: Array | np.ndarray) -> int:
  """How many tiles; all channels come by in each."""
  columns = -(-x.size // TILE)
  while math.gcd(columns, x.shape[-1]) > 1:
    columns += 1
  return columns


def room(tiles: np.ndarray, margin: float) -> int:
  """Words of the fullest tile that are not zero, and some more.

  Args:
    tiles: words `(tiles, 1024)`, what is calibrated with.
    margin: share that is added.
  """
  fullest = int(np.count_nonzero(tiles, axis=1).max())
  return min(TILE, max(1, math.ceil((1 + margin) * fullest)))


def overflows(tiles: np.ndarray, room: int) -> int:
  """Tiles that have no room for all their words."""
  return int(np.count_nonzero(np.count_nonzero(tiles, axis=1) > room))


def tiled(x: np.ndarray, layout: str) -> np.ndarray:
  """Words of an activation in tiles.

  Args:
    x: channels last.
    layout: "nhwc", whose tiles are of neighbours, or "spread".
  """
  flat = words(x)
  if layout == "spread":
    columns = _columns(x)
    flat = np.pad(flat, (0, TILE * columns - x.size))
    return flat.reshape(TILE, columns).T
  return np.pad(flat, (0, -x.size % TILE)).reshape(-1, TILE)


@functools.cache
def payload_bytes(tiles: int, room: int, dtype: str) -> int:
  """Bytes of `zero_value`'s payload."""
  like = jax.ShapeDtypeStruct((tiles, TILE), dtype)
  return wire.payload_bytes(make_codec(room), like)


def make_codec(room: int) -> zero_value:
  """The codec whose tiles have room for so many values."""
  return zero_value(capacity=room / TILE, tile=TILE)
