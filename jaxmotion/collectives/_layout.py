"""How an exchange lays its arrays out: whole, or in a row for each worker."""

import math

import jax

from jaxmotion.codecs.extend import Partition
from jaxmotion.core import ShapedLike, shape_dtype as like_of

# Gathering sends (N - 1) P bytes, two phases 2 (N - 1) / N P: equal for two.
_GATHER_MOST_WORKERS = 2
# Shards of fewer values are mostly scales and padding.
_LEAST_SHARD = 64
# One row in so many may be padding: codecs of matrices are faster than those of
# vectors, and a vector would be padded too.
_PADDED = 64
# Values of a summable array that goes with others. Joining copies them.
_MOST_JOINED = 1 << 16


def is_cut(like: ShapedLike, workers: int) -> bool:
  """Says whether an array is large enough for a shard a worker.

  Args:
    like: shape and dtype of the array.
    workers: how many there are.

  Example:
    >>> import jax.numpy as jnp
    >>> is_cut(jnp.zeros(256), 4), is_cut(jnp.zeros(255), 4)
    (True, False)
  """
  return math.prod(like.shape) >= _LEAST_SHARD * workers


def row_like(like: ShapedLike, workers: int) -> jax.ShapeDtypeStruct:
  """The shard of an array that one worker reduces: rows, where hardly any are
  padding.

  Args:
    like: shape and dtype of the array.
    workers: how many there are.

  Example:
    >>> import jax.numpy as jnp
    >>> row_like(jnp.zeros((8, 32)), 4).shape, row_like(jnp.zeros(10), 4).shape
    ((2, 32), (3,))
    >>> [row_like(jnp.zeros((n, 32)), 3).shape for n in (8, 128)]
    [(86,), (43, 32)]
  """
  size, minor = math.prod(like.shape), like.shape[-1] if like.shape else 1
  count = size // minor if len(like.shape) > 1 and minor else 0
  rows = math.ceil(count / workers)
  if 0 < count and workers * rows - count <= count // _PADDED:
    shape: tuple[int, ...] = (rows, minor)
  else:
    shape = (math.ceil(size / workers),)
  return jax.ShapeDtypeStruct(shape, like.dtype)


def shard_like(like: ShapedLike, workers: int) -> jax.ShapeDtypeStruct:
  """What a worker has of an array that is cut if it is large enough.

  Args:
    like: shape and dtype of the array.
    workers: how many there are.

  Example:
    >>> import jax.numpy as jnp
    >>> shard_like(jnp.zeros(256), 4).shape, shard_like(jnp.zeros(8), 4).shape
    ((64,), (8,))
  """
  return row_like(like, workers) if is_cut(like, workers) else like_of(like)


def choose_methods(
  cut: Partition, workers: int, method: str | None
) -> list[str]:
  """Chooses how every array of a tree is reduced.

  Args:
    cut: the arrays and their codecs.
    workers: how many there are.
    method: "gather" or "two_phase" for what is large and not summable; None
      chooses by the number of workers.

  Returns:
    "sum", "gather" or "two_phase" for each array.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> from jaxmotion.codecs.extend import partition
    >>> tree = {"b": jnp.zeros(8), "w": jnp.zeros((64, 64))}
    >>> cut = partition(codecs.uniform(bits=8), tree)
    >>> choose_methods(cut, 4, None)
    ['gather', 'two_phase']
  """
  if method is None:
    few = workers <= _GATHER_MOST_WORKERS
    method = "gather" if few else "two_phase"
  all_sum = all(part.codec.summable for part in cut.leaf_groups)
  chosen = []
  for part, like in zip(cut.leaf_groups, cut.likes(), strict=True):
    if part.codec.summable:
      # A small one beside others goes with them, not in a sum of its own:
      # between two workers that is as many bytes.
      small = math.prod(like.shape) <= _MOST_JOINED
      joins = workers == 2 and not all_sum and small
      chosen.append("gather" if joins else "sum")
    else:
      chosen.append(method if is_cut(like, workers) else "gather")
  return chosen
