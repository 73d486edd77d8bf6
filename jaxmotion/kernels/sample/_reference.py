"""Stratified sampling: one random position from each of k contiguous runs."""

import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array
from jaxmotion.kernels import _words


def stratum_sizes(size: int, k: int) -> Array:
  """Returns the lengths of k contiguous runs that make up `size`, int32[k].

  They are floor(size / k) or one more, the longer ones first.

  >>> stratum_sizes(10, 4).tolist()
  [3, 3, 2, 2]
  """
  short, longer = divmod(size, max(1, k))
  return short + (lax.iota(jnp.int32, k) < longer).astype(jnp.int32)


def draw_stratified(seed: Array, size: int, k: int) -> Array:
  """Draws one position of every run, int32[k], in ascending order.

  Args:
    seed: uint32[].
    size: number of positions.
    k: number of runs, at most `size`.

  Returns:
    Positions; each one of a run of m is drawn with probability 1 / m, up to
    2^-32.

  Example:
    >>> draw_stratified(jnp.uint32(1), 4, 4).tolist()
    [0, 1, 2, 3]
  """
  short, longer = divmod(size, max(1, k))
  run = lax.iota(jnp.int32, k)
  first = run * short + jnp.minimum(run, longer)
  lengths = stratum_sizes(size, k).astype(jnp.uint32)
  offset = _words.mul_high(core.random_words(seed, (k,)), lengths)
  return first + offset.astype(jnp.int32)
