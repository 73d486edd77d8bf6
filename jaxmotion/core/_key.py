"""Counter-hash random numbers: cheap, and the same bits on every backend.

A key is two 32-bit words: one that all workers share, and one of this worker's
own. Random words are a hash of (word, position), so a pass over an array reads
no random state and costs two multiplications per element. The hash is the
two-round xorshift-multiply `lowbias32` (Wellons, *hash-prospector*, 2018).
"""

import functools
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import _checks, _tree


def mix_bits(h: _tree.Array) -> _tree.Array:
  """Hashes each uint32 word to another (a bijection on 32 bits)."""
  h = (h ^ (h >> 16)) * jnp.uint32(0x7FEB352D)
  h = (h ^ (h >> 15)) * jnp.uint32(0x846CA68B)
  return h ^ (h >> 16)


def _low_word(value: _tree.Array | int) -> _tree.Array:
  """Returns the low 32 bits of an integer as uint32."""
  if isinstance(value, int):
    return jnp.uint32(value & 0xFFFFFFFF)
  return jnp.asarray(value).astype(jnp.uint32)


def _check_word(name: str, value: Any) -> None:
  """Raises unless `value` is a Python int or an array of integers."""
  if type(value) is not int and not (
    hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.integer)
  ):
    raise TypeError(
      f"`{name}` must be an int or an array of integers, got {value!r:.200}."
    )


def combine_seeds(seed: _tree.Array, data: _tree.Array | int) -> _tree.Array:
  """Hashes a seed and one more word into a new seed, both uint32[]."""
  return _combine_words(seed, _low_word(data))


@functools.partial(jax.jit, inline=True)  # Traced once, not for each leaf.
def _combine_words(seed: _tree.Array, word: _tree.Array) -> _tree.Array:
  return mix_bits(
    mix_bits(seed) + word * jnp.uint32(0x9E3779B9) + jnp.uint32(1)
  )


class Key(NamedTuple):
  """Seeds for a codec's random choices.

  Attributes:
    shared: uint32[], equal on all workers (which entries are sampled).
    worker: uint32[], this worker's own (how values are rounded).

  Example:
    >>> from jaxmotion import make_key
    >>> key = make_key(0, worker=3)
    >>> step = key.fold(7)  # The same in each run.
    >>> step == make_key(0, worker=3).fold(7), step == key.fold(8)
    (True, False)
  """

  shared: _tree.Array
  worker: _tree.Array

  def fold(self, data: _tree.Array | int) -> "Key":
    """Returns the key for one more coordinate (a step, a leaf, a shard).

    Args:
      data: the coordinate, an int or an array of integers.

    Raises:
      TypeError: `data` is no integer.
    """
    _check_word("data", data)
    return Key(
      combine_seeds(self.shared, data), combine_seeds(self.worker, data)
    )

  @_checks.declare(path=_checks.text)
  def fold_path(self, path: str) -> "Key":
    """Returns the key of the leaf with this path, in any order of leaves.

    Args:
      path: path of the leaf, such as "dense/kernel".

    Raises:
      TypeError: `path` is not a string.
    """
    return self.fold(zlib.crc32(path.encode()))


def optional_key(name: str, value: Any) -> Any:
  """Returns a `Key` or None, or raises."""
  noun = "a jaxmotion.Key (make one with jaxmotion.make_key(seed)) or None"
  return _checks.optional(_checks.instance(Key, noun))(name, value)


def make_key(seed: int | _tree.Array, worker: int | _tree.Array = 0) -> Key:
  """Returns the key of a seed and a worker index.

  Args:
    seed: int or uint32[].
    worker: this worker's index, int or int32[].

  Returns:
    The key; `make_key(seed, w).shared` does not depend on `w`.

  Raises:
    TypeError: `seed` or `worker` is no integer.

  Example:
    >>> a, b = make_key(0, worker=0), make_key(0, worker=1)
    >>> bool(a.shared == b.shared), bool(a.worker == b.worker)
    (True, False)
  """
  _check_word("seed", seed)
  _check_word("worker", worker)
  shared = mix_bits(_low_word(seed))
  return Key(shared, combine_seeds(shared, worker))


def random_words(seed: _tree.Array, shape: Sequence[int]) -> _tree.Array:
  """Returns uint32 words of `shape`, uniform over all 32-bit values."""
  counter = lax.iota(jnp.uint32, math.prod(shape)).reshape(tuple(shape))
  return random_words_at(seed, counter)


def random_words_at(seed: _tree.Array, position: _tree.Array) -> _tree.Array:
  """Returns the `random_words` at these positions of the flat array."""
  # seed: uint32[]; position: uint32 of any shape.
  # The seed is mixed first: otherwise neighboring seeds would hash the same
  # inputs at other positions.
  return mix_bits(position * jnp.uint32(0x9E3779B9) + mix_bits(seed))
