"""Public functions of bit packing, which choose an implementation.

An op that computes codes, or reads them, calls the functions of the reference
inside its own expression, so that both are one pass.
"""

from typing import Any

from jaxmotion import core
from jaxmotion.core import Array
from jaxmotion.kernels import _checks, _dispatch
from jaxmotion.kernels.pack import _pallas_triton, _reference


def pack(
  codes: Array, bits: int, *, implementation: str | None = None
) -> Array:
  """Packs codes of a fixed width into words.

  Args:
    codes: uint32[P, ...] with P = `num_planes(bits)`, each below 2**bits.
    bits: width of a code, 1 to 32.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    uint32[P * bits / 32, ...].

  Example:
    >>> import jax.numpy as jnp
    >>> codes = jnp.arange(8, dtype=jnp.uint32).reshape(8, 1)
    >>> hex(int(pack(codes, 4)[0, 0]))
    '0x76543210'
  """
  _checks.check_words("codes", codes, (_reference.num_planes(bits), "..."), 32)
  return _dispatch.dispatch(
    {"reference": _reference.pack, "pallas_triton": _pallas_triton.pack},
    codes,
    gpu=_preferred_for_packing(bits),
    implementation=implementation,
    bits=bits,
  )


def unpack(
  words: Array, bits: int, *, implementation: str | None = None
) -> Array:
  """Returns the codes that `pack` packed into words.

  Args:
    words: uint32[P * bits / 32, ...].
    bits: width of a code, 1 to 32.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    uint32[P, ...].
  """
  _check_packed(words, bits)
  return _dispatch.dispatch(
    {"reference": _reference.unpack, "pallas_triton": _pallas_triton.unpack},
    words,
    implementation=implementation,
    bits=bits,
  )


def pack_flat(
  codes: Array, bits: int, *, implementation: str | None = None
) -> Array:
  """Packs codes of any shape and number; zeros fill the last column.

  Args:
    codes: uint32 of any shape, each below 2**bits.
    bits: width of a code, 1 to 32.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    uint32[rows, columns], columns = ceil(codes.size / num_planes(bits)).

  Example:
    >>> import jax.numpy as jnp
    >>> pack_flat(jnp.array([1, 2, 3], jnp.uint32), 8).tolist()
    [[197121]]
  """
  _checks.check_words("codes", codes, ("...",), 32)
  return _dispatch.dispatch(
    {
      "reference": _reference.pack_flat,
      "pallas_triton": _pallas_triton.pack_flat,
    },
    codes,
    gpu=_preferred_for_packing(bits),
    implementation=implementation,
    bits=bits,
  )


def unpack_flat(
  words: Array, bits: int, size: int, *, implementation: str | None = None
) -> Array:
  """Returns the codes that `pack_flat` packed, as uint32[size].

  Args:
    words: uint32[rows, columns].
    bits: width of a code, 1 to 32.
    size: number of codes.
    implementation: name of the only implementation to try; None chooses one.

  Example:
    >>> import jax.numpy as jnp
    >>> words = pack_flat(jnp.arange(3, dtype=jnp.uint32), 5)
    >>> unpack_flat(words, 5, 3).tolist()
    [0, 1, 2]
  """
  _check_packed(words, bits)
  core.check_int("size", size, 0, words.size * 32 // bits)
  return _dispatch.dispatch(
    {
      "reference": _reference.unpack_flat,
      "pallas_triton": _pallas_triton.unpack_flat,
    },
    words,
    implementation=implementation,
    bits=bits,
    size=size,
  )


def _check_packed(words: Any, bits: Any) -> None:
  _checks.check_words(
    "words", words, (_reference.num_planes(bits) * bits // 32, "..."), 32
  )


def _preferred_for_packing(bits: int) -> tuple[str, ...]:
  # XLA:GPU reads the codes once for each field, the kernel once in all.
  return ("pallas_triton",) if len(_reference.field_widths(bits)) > 1 else ()
