"""Packs small integer codes (masks, argmax positions) into uint32 words.

`kernels.pack` reads codes that are in memory, 32 bits each. For a mask, that
is 32 times what is saved of it. Here the codes are the operand of a reduction,
so the compiler computes them inside the pass that packs them.
"""

import math

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array


def code_width(count: int) -> int:
  """Returns the least power of two of bits that tells `count` codes apart.

  >>> [code_width(count) for count in (2, 4, 9, 49)]
  [1, 2, 4, 8]
  """
  bits = max(1, (count - 1).bit_length())
  return 1 << (bits - 1).bit_length()


def pack_codes(codes: Array, bits: int) -> Array:
  """Packs codes of any shape into uint32[ceil(size * bits / 32)].

  Word i holds the codes i, i + n, i + 2 n, ..., n being the number of words:
  the reduction then runs along the first axis and vectorizes along the second.

  Args:
    codes: booleans or integers below 2**bits.
    bits: 1, 2, 4, 8 or 16.
  """
  planes = 32 // bits
  flat = codes.reshape(-1)
  flat = jnp.pad(flat, (0, -flat.size % planes)).reshape(planes, -1)
  shifts = jnp.uint32(bits) * lax.iota(jnp.uint32, planes)[:, None]
  words = flat.astype(jnp.uint32) << shifts
  return lax.reduce(words, jnp.uint32(0), lax.bitwise_or, (0,))


def unpack_codes(words: Array, bits: int, shape: tuple[int, ...]) -> Array:
  """Inverts `pack_codes`; returns uint32 codes of the given shape.

  >>> codes = jnp.arange(10) % 4
  >>> unpack_codes(pack_codes(codes, 2), 2, (2, 5)).tolist()
  [[0, 1, 2, 3, 0], [1, 2, 3, 0, 1]]
  """
  planes = 32 // bits
  shifts = jnp.uint32(bits) * lax.iota(jnp.uint32, planes)[:, None]
  codes = (words[None] >> shifts) & jnp.uint32(2**bits - 1)
  return codes.reshape(-1)[: math.prod(shape)].reshape(shape)
