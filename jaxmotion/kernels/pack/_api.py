"""Public functions of bit packing, which choose an implementation.

An op that computes codes, or reads them, calls the functions of the reference
inside its own expression, so that both are one pass.
"""

import functools

from jaxmotion import core
from jaxmotion.core import Array
from jaxmotion.kernels import _checks, _dispatch
from jaxmotion.kernels.pack import _pallas_triton, _reference

# XLA:GPU reads the codes once for each field of a word, the kernel once in all.
_TABLE = {"reference": _reference, "pallas_triton": _pallas_triton}
_run = functools.partial(_dispatch.dispatch, _TABLE)


def pack_flat(
  codes: Array, bits: int, *, implementation: str | None = None
) -> Array:
  """Packs codes of any shape and number; zeros fill the last column.

  Args:
    codes: unsigned integers of any width and shape, each below 2**bits.
    bits: width of a code, 1 to 32.
    implementation: name of the only implementation to try; None chooses one.

  Returns:
    uint32[rows, columns], columns = ceil(codes.size / num_planes(bits)).

  Example:
    >>> import jax.numpy as jnp
    >>> pack_flat(jnp.array([1, 2, 3], jnp.uint32), 8).tolist()
    [[197121]]
  """
  _checks.check_words("codes", codes, ("...",))
  return _run(
    "pack_flat",
    codes,
    implementation=implementation,
    bits=bits,
  )


def unpack_flat(
  words: Array,
  bits: int,
  size: int,
  dtype: str = "uint32",
  *,
  implementation: str | None = None,
) -> Array:
  """Returns the codes that `pack_flat` packed, as a vector of `size`.

  Args:
    words: uint32[rows, columns].
    bits: width of a code, 1 to 32.
    size: number of codes.
    dtype: unsigned integers of at least so many bits, which are returned.
    implementation: name of the only implementation to try; None chooses one.

  Example:
    >>> import jax.numpy as jnp
    >>> words = pack_flat(jnp.arange(3, dtype=jnp.uint32), 5)
    >>> unpack_flat(words, 5, 3).tolist()
    [0, 1, 2]
  """
  _checks.check_words("words", words, (_reference.word_rows(bits), "..."), 32)
  core.integer(0, words.size * 32 // bits)("size", size)
  return _run(
    "unpack_flat",
    words,
    implementation=implementation,
    bits=bits,
    size=size,
    dtype=dtype,
  )
