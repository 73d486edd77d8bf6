"""Packs small integer codes (masks, argmax positions) into uint32 words.

`kernels.pack` reads codes that are in memory, 32 bits each. For a mask, that
is 32 times what is saved of it. Here the codes are the operand of a reduction,
so the compiler computes them inside the pass that packs them.

A word holds neighboring codes of the last axes, and the axes before these
stay. A compiler that partitions the array then packs each part where it is.
Words whose codes are far apart would make it reduce over the devices.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array


def code_width(count: int) -> int:
  """Returns the least power of two of bits that tells `count` codes apart.

  >>> [code_width(count) for count in (2, 4, 9, 49)]
  [1, 2, 4, 8]
  """
  bits = max(1, (count - 1).bit_length())
  return 1 << (bits - 1).bit_length()


@core.trace_in_place
def pack_codes(codes: Array, bits: int) -> Array:
  """Packs codes of any shape into uint32 words, ceil(size * bits / 32) of
  them."""
  per_word = 32 // bits
  rows = codes.reshape(_word_rows(codes.shape, per_word))
  if padding := -rows.shape[-1] % per_word:
    rows = jnp.pad(rows, (0, padding))
  groups = rows.reshape(*rows.shape[:-1], -1, per_word).astype(jnp.uint32)
  # The sum of shifted codes has no carries. A reduction by `or` would say so,
  # but compilers that partition programs cannot run it across devices.
  words = groups << _code_shifts(bits, groups.ndim)
  return jnp.sum(words, -1, dtype=jnp.uint32)


def packed_like(shape: tuple[int, ...], bits: int) -> jax.ShapeDtypeStruct:
  """Returns the type of what `pack_codes` makes of codes of a shape.

  >>> packed_like((8, 4, 6, 16), 1), packed_like((3, 5), 2).shape
  (ShapeDtypeStruct(shape=(8, 4, 3), dtype=uint32), (1,))
  """
  *rows, last = _word_rows(shape, 32 // bits)
  return jax.ShapeDtypeStruct((*rows, -(-last * bits // 32)), jnp.uint32)


@core.trace_in_place
def unpack_codes(words: Array, bits: int, shape: tuple[int, ...]) -> Array:
  """Inverts `pack_codes`; returns uint32 codes of the given shape.

  >>> codes = jnp.arange(10) % 4
  >>> unpack_codes(pack_codes(codes, 2), 2, (2, 5)).tolist()
  [[0, 1, 2, 3, 0], [1, 2, 3, 0, 1]]
  """
  rows = _word_rows(shape, 32 // bits)
  shifts = _code_shifts(bits, words.ndim + 1)
  codes = (words[..., None] >> shifts) & jnp.uint32(2**bits - 1)
  codes = codes.reshape(*rows[:-1], -1)
  if codes.shape[-1] > rows[-1]:
    codes = codes[: rows[-1]]
  return codes.reshape(shape)


def _code_shifts(bits: int, ndim: int) -> Array:
  """Returns by how many bits each code of a word is shifted."""
  # A vector, since XLA computes an array of positions of the codes' shape once
  # for a whole loop: for the masks of an attention, 512 MiB.
  shifts = jnp.uint32(bits) * lax.iota(jnp.uint32, 32 // bits)
  return shifts.reshape((1,) * (ndim - 1) + shifts.shape)


def _word_rows(shape: tuple[int, ...], per_word: int) -> tuple[int, ...]:
  """Returns a shape with the last axes merged until they fill whole words.

  Where no number of axes does, all are merged, and the last word is not full.

  >>> _word_rows((8, 4, 6, 16), 32), _word_rows((3, 5), 32)
  ((8, 4, 96), (15,))
  """
  last = 1
  for axis in reversed(range(len(shape))):
    last *= shape[axis]
    if last % per_word == 0:
      return (*shape[:axis], last)
  return (last,)
