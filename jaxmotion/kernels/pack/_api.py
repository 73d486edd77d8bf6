"""Bit fields into 32-bit words: the implementation is chosen here.

An op that computes codes or reads them calls the reference's functions in the
midst of its own, so that they are one pass.
"""

from typing import Any

from jaxmotion.core import Array
from jaxmotion.kernels._dispatch import run
from jaxmotion.kernels.pack._reference import fields


def pack(
  codes: Array, bits: int, *, implementation: str | None = None
) -> Array:
  """Packs codes of a fixed width into words.

  Args:
    codes: uint32[P, ...] with P = `planes(bits)`, each below 2**bits.
    bits: width of a code, 1 to 32.
    implementation: the only one to try, by name; None chooses.

  Returns:
    uint32[P * bits / 32, ...].

  Example:
    >>> import jax.numpy as jnp
    >>> codes = jnp.arange(8, dtype=jnp.uint32).reshape(8, 1)
    >>> hex(int(pack(codes, 4)[0, 0]))
    '0x76543210'
  """
  return _pack("pack", codes, bits, implementation)


def unpack(
  words: Array, bits: int, *, implementation: str | None = None
) -> Array:
  """Inverts `pack`.

  Args:
    words: uint32[P * bits / 32, ...].
    bits: width of a code, 1 to 32.
    implementation: the only one to try, by name; None chooses.

  Returns:
    uint32[P, ...].
  """
  return _run("unpack", words, implementation=implementation, bits=bits)


def pack_flat(
  codes: Array, bits: int, *, implementation: str | None = None
) -> Array:
  """Packs codes of any shape and number, zeros filling the last column.

  Args:
    codes: uint32 of any shape, each below 2**bits.
    bits: width of a code, 1 to 32.
    implementation: the only one to try, by name; None chooses.

  Returns:
    uint32[rows, columns], columns = ceil(codes.size / planes(bits)).

  Example:
    >>> import jax.numpy as jnp
    >>> pack_flat(jnp.array([1, 2, 3], jnp.uint32), 8).tolist()
    [[197121]]
  """
  return _pack("pack_flat", codes, bits, implementation)


def unpack_flat(
  words: Array, bits: int, size: int, *, implementation: str | None = None
) -> Array:
  """Inverts `pack_flat`, to uint32[size].

  Args:
    words: uint32[rows, columns].
    bits: width of a code, 1 to 32.
    size: number of codes.
    implementation: the only one to try, by name; None chooses.

  Example:
    >>> import jax.numpy as jnp
    >>> words = pack_flat(jnp.arange(3, dtype=jnp.uint32), 5)
    >>> unpack_flat(words, 5, 3).tolist()
    [0, 1, 2]
  """
  return _run(
    "unpack_flat", words, implementation=implementation, bits=bits, size=size
  )


def _pack(
  op: str, codes: Array, bits: int, implementation: str | None
) -> Array:
  # XLA:GPU reads the codes once for each field, the kernel once in all.
  gpu = ("pallas_triton",) if len(fields(bits)) > 1 else ()
  return _run(op, codes, implementation=implementation, gpu=gpu, bits=bits)


def _run(op: str, x: Array, **static: Any) -> Array:
  return run("pack", op, x, **static)
