"""Small codes in words, packed in the pass that makes them.

`kernels.pack` reads codes that are in memory, 32 bits each: of a mask that is
32 times what is kept of it. Here they are the operand of a reduction, which the
compiler makes them in.
"""

import math

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array


def width(count: int) -> int:
  """The least power of two of bits that tells `count` codes apart.

  >>> [width(count) for count in (2, 4, 9, 49)]
  [1, 2, 4, 8]
  """
  bits = max(1, (count - 1).bit_length())
  return 1 << (bits - 1).bit_length()


def pack(codes: Array, bits: int) -> Array:
  """Packs codes of any shape into uint32[ceil(size * bits / 32)].

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


def unpack(words: Array, bits: int, shape: tuple[int, ...]) -> Array:
  """Inverts `pack`, to uint32 of the shape.

  >>> codes = jnp.arange(10) % 4
  >>> unpack(pack(codes, 2), 2, (2, 5)).tolist()
  [[0, 1, 2, 3, 0], [1, 2, 3, 0, 1]]
  """
  planes = 32 // bits
  shifts = jnp.uint32(bits) * lax.iota(jnp.uint32, planes)[:, None]
  codes = (words[None] >> shifts) & jnp.uint32(2**bits - 1)
  return codes.reshape(-1)[: math.prod(shape)].reshape(shape)
