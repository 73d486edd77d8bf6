"""Bytes of an activation under codes that leave zeros out.

Only the codes of `jaxmotion.codecs` have a static shape. The bytes of the other
codes depend on the values, as those of a DMA engine do.
"""

import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, wire
from jaxmotion.core import Array

PUBLISHED_CODE = "zvc32"
"""Code that cDMA's authors publish ratios of."""
OURS = "zero_value_bf16"
"""Smallest code that `jaxmotion.codecs` has for activations."""

CODES = {
  "rle_nhwc": "run-length, channels last",
  "rle_nchw": "run-length, channels first",
  PUBLISHED_CODE: "cDMA's zero-value code, 32-bit words",
  "zvc16": "the same, bf16 words",
  "zero_value_nhwc": "zero_value, float32, tiles of neighbors",
  "zero_value": "zero_value, float32, spread tiles",
  OURS: "zero_value, bf16 words, spread tiles",
  "planes_zlib": "mask and byte planes under zlib, on the host",
}
"""Description of each code; the last is for a host, as a reference."""


TILE = 1024
_LONGEST = 255  # Longest run that a byte can count.


def to_words(x: np.ndarray) -> np.ndarray:
  """Returns the bits of floats as a flat array of unsigned words."""
  return np.ascontiguousarray(x).reshape(-1).view(f"u{x.itemsize}")


def run_length_bytes(values: np.ndarray) -> int:
  """Returns the bytes of run-length coding.

  Each pair of bytes counts zeros and other words; the other words follow it.

  >>> run_length_bytes(np.array([0, 0, 7, 8, 0], np.uint32))  # 2 2 7 8 1 0
  12
  """
  if not values.size:
    return 0
  zero = values == 0
  ends = np.flatnonzero(np.append(zero[1:] != zero[:-1], True)) + 1
  lengths = np.diff(ends, prepend=0)
  first = 0 if zero[0] else 1  # Runs of zeros have even indices.
  lengths = np.concatenate([np.zeros(first, int), lengths, np.zeros(1, int)])
  lengths = lengths[: lengths.size // 2 * 2].reshape(-1, 2)
  # A run longer than a byte can count takes more pairs, whose other count is 0.
  pairs = np.maximum(1, -(-lengths // _LONGEST)).sum(axis=1) - 1
  return int(2 * pairs.sum() + values.itemsize * np.count_nonzero(values))


def zero_value_bytes(values: np.ndarray) -> int:
  """Returns the bytes of masks of 32 words, and of the words that are not zero.

  This is cDMA's code (ZVC) for words of 32 bits.

  >>> zero_value_bytes(np.array([0, 0, 7, 8, 0], np.uint32))
  12
  """
  mask = np.packbits(np.pad(values != 0, (0, -values.size % 32)))
  return mask.nbytes + values[values != 0].nbytes


def entropy_bytes(values: np.ndarray) -> int:
  """Returns the bytes of the mask and of the words' byte planes under zlib."""
  # The first plane has the first bytes of all words that are not zero, the
  # second plane their second bytes, and so on. Exponents compress; mantissas do
  # not.
  kept = values[values != 0]
  planes = kept.view(np.uint8).reshape(-1, kept.itemsize).T
  parts = np.packbits(values != 0), *planes
  return sum(len(zlib.compress(part.tobytes())) for part in parts)


def spread_tiles(x: Array) -> Array:
  """Cuts an array into tiles of elements that are far apart."""
  # Elements that are not zero have neighbors that are not zero. So the fullest
  # tile of neighbors needs much more room than the mean tile, and it decides
  # the room of all. Tiles of elements from all over the array are about equally
  # full.
  columns = _count_tiles(x)
  flat = jnp.pad(x.reshape(-1), (0, TILE * columns - x.size))
  return flat.reshape(TILE, columns).T


def gather_tiles(tiles: Array, like: Array) -> Array:
  """Inverts `spread_tiles`: returns the array in the shape of `like`."""
  return tiles.T.reshape(-1)[: like.size].reshape(like.shape)


def _count_tiles(x: Array | np.ndarray) -> int:
  """Returns a number of tiles that puts all channels into each tile."""
  columns = -(-x.size // TILE)
  while math.gcd(columns, x.shape[-1]) > 1:
    columns += 1
  return columns


def calibrate_room(tiles: np.ndarray, margin: float) -> int:
  """Returns the nonzero words of the fullest tile, plus a margin."""
  fullest = int(np.count_nonzero(tiles, axis=1).max())
  return min(TILE, max(1, math.ceil((1 + margin) * fullest)))


def count_overflows(tiles: np.ndarray, room: int) -> int:
  """Returns the number of tiles with more nonzero words than room."""
  return int(np.count_nonzero(np.count_nonzero(tiles, axis=1) > room))


def cut_tiles(x: np.ndarray, layout: str) -> np.ndarray:
  """Returns the words of an activation in tiles."""
  flat = to_words(x)
  if layout == "spread":
    columns = _count_tiles(x)
    flat = np.pad(flat, (0, TILE * columns - x.size))
    return flat.reshape(TILE, columns).T
  return np.pad(flat, (0, -x.size % TILE)).reshape(-1, TILE)


@functools.cache
def payload_bytes(tiles: int, room: int, dtype: str) -> int:
  """Returns the bytes of the payload of `zero_value`."""
  like = jax.ShapeDtypeStruct((tiles, TILE), dtype)
  return wire.payload_bytes(make_codec(room), like)


def make_codec(room: int) -> codecs.zero_value:
  """Returns the codec whose tiles have room for that many elements."""
  return codecs.zero_value(capacity=room / TILE, tile=TILE)
