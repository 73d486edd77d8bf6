"""Layout of an exchange: which arrays are split into shards, and how.

These rules are the contract between the collectives, which follow them, and
the performance model and planner, which predict bytes and seconds from them.
"""

import math

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import Division, Partition, check_codec
from jaxmotion.collectives import _arguments
from jaxmotion.core import ShapedLike

METHODS = (None, "gather", "two_phase")

# A gather sends (N - 1) P bytes, two phases send 2 (N - 1) / N P: equal for 2.
_GATHER_MAX_WORKERS = 2
# Shards of fewer elements consist mostly of scales and padding.
_MIN_SHARD_ELEMENTS = 64
# At most one row in so many may be padding. Codecs of matrices are faster than
# those of vectors, and a vector would be padded too.
_ROWS_PER_PADDING = 64
# Payloads are divided if at most one byte in so many is padding: parts have
# whole blocks.
_BYTES_PER_PADDING = 16
# Largest summable array, in elements, that is joined with others: joining is a
# copy.
_MAX_JOINED_ELEMENTS = 1 << 16


def is_sharded(like: ShapedLike, workers: int) -> bool:
  """Returns whether an array is large enough for one shard per worker.

  Args:
    like: shape and dtype of the array.
    workers: number of workers.

  Example:
    >>> import jax.numpy as jnp
    >>> is_sharded(jnp.zeros(256), 4), is_sharded(jnp.zeros(255), 4)
    (True, False)
  """
  _arguments.check_shaped("like", like)
  core.check_int("workers", workers, 1)
  return math.prod(like.shape) >= _MIN_SHARD_ELEMENTS * workers


def row_like(like: ShapedLike, workers: int) -> jax.ShapeDtypeStruct:
  """Returns the shape of the shard of an array that one worker reduces.

  A matrix is split into blocks of its rows if hardly any row is padding, and
  any other array into pieces of a vector.

  Args:
    like: shape and dtype of the array.
    workers: number of workers.

  Example:
    >>> import jax.numpy as jnp
    >>> row_like(jnp.zeros((8, 32)), 4).shape, row_like(jnp.zeros(10), 4).shape
    ((2, 32), (3,))
    >>> [row_like(jnp.zeros((n, 32)), 3).shape for n in (8, 128)]
    [(86,), (43, 32)]
  """
  _arguments.check_shaped("like", like)
  core.check_int("workers", workers, 1)
  size, minor = math.prod(like.shape), like.shape[-1] if like.shape else 1
  count = size // minor if len(like.shape) > 1 and minor else 0
  rows = math.ceil(count / workers)
  if 0 < count and workers * rows - count <= count // _ROWS_PER_PADDING:
    shape: tuple[int, ...] = (rows, minor)
  else:
    shape = (math.ceil(size / workers),)
  return jax.ShapeDtypeStruct(shape, like.dtype)


def find_division(
  codec: codecs.Codec, like: ShapedLike, workers: int
) -> Division | None:
  """Returns how two phases divide payloads of an array between workers.

  It is None if they divide the array, because the codec's payloads cannot be
  divided, or because their parts would be padded much.

  Args:
    codec: encodes the array.
    like: shape and dtype of the array.
    workers: number of workers.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> like = jnp.zeros((2048, 1024))
    >>> find_division(codecs.sign(), like, 3).like.shape
    (32, 22, 1024)
    >>> find_division(codecs.cast("bfloat16"), like, 3) is None
    True
  """
  check_codec("codec", codec)
  division = codec.division(like, workers)
  if division is None:
    return None
  whole, part = (
    core.tree_bytes(codec.payload_like(a)) for a in (like, division.like)
  )
  padding = workers * part - whole
  return division if padding <= whole // _BYTES_PER_PADDING else None


def part_like(
  codec: codecs.Codec, like: ShapedLike, workers: int
) -> jax.ShapeDtypeStruct:
  """Returns the shape of the array whose mean one worker encodes.

  Args:
    codec: encodes the array.
    like: shape and dtype of the array.
    workers: number of workers.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> part_like(codecs.cast("bfloat16"), jnp.zeros((128, 32)), 3).shape
    (43, 32)
  """
  division = find_division(codec, like, workers)
  return row_like(like, workers) if division is None else division.like


def shard_like(like: ShapedLike, workers: int) -> jax.ShapeDtypeStruct:
  """Returns the shape of what one worker has: a shard, or a small array whole.

  Args:
    like: shape and dtype of the array.
    workers: number of workers.

  Example:
    >>> import jax.numpy as jnp
    >>> shard_like(jnp.zeros(256), 4).shape, shard_like(jnp.zeros(8), 4).shape
    ((64,), (8,))
  """
  if is_sharded(like, workers):
    return row_like(like, workers)
  return core.shape_dtype(like)


def is_summed(codec: codecs.Codec, like: ShapedLike) -> bool:
  """Says whether the network adds up the payloads of an array.

  It does for a summable codec, unless the payload is in float16. A sum over
  workers overflows where their mean does not, so it is made in float32.

  Args:
    codec: encodes the array.
    like: shape and dtype of the array.

  Example:
    >>> from jaxmotion import codecs
    >>> likes = [jax.ShapeDtypeStruct((8,), d) for d in ("float32", "float16")]
    >>> [is_summed(codecs.identity(), like) for like in likes]
    [True, False]
  """
  check_codec("codec", codec)
  _arguments.check_shaped("like", like)
  is_half = codec.keeps_dtype and like.dtype == jnp.float16
  return codec.summable and not is_half


def choose_methods(
  partition: Partition, workers: int, method: str | None
) -> list[str]:
  """Chooses the method that reduces each array of a tree.

  Args:
    partition: the arrays of the tree and their codecs.
    workers: number of workers.
    method: "gather" or "two_phase" for arrays that are large and not summable;
      None chooses by the number of workers.

  Returns:
    "sum", "gather", "two_phase" or, for codecs with rounds of their own,
    "rounds", for each array.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> from jaxmotion.codecs.extend import partition
    >>> tree = {"b": jnp.zeros(8), "w": jnp.zeros((64, 64))}
    >>> choose_methods(partition(codecs.uniform(bits=8), tree), 4, None)
    ['gather', 'two_phase']
  """
  core.check_instance("partition", partition, Partition, "a Partition")
  core.check_int("workers", workers, 1)
  core.check_choice("method", method, METHODS)
  if method is None:
    few = workers <= _GATHER_MAX_WORKERS
    method = "gather" if few else "two_phase"
  groups = partition.leaf_groups
  likes = partition.array_likes()
  summed = [
    is_summed(group.codec, like)
    for group, like in zip(groups, likes, strict=True)
  ]
  methods = []
  for group, is_added, like in zip(groups, summed, likes, strict=True):
    if group.codec.round_kinds:
      methods.append("rounds")
    elif is_added:
      # Between two workers a gather has as many bytes as a sum. So a small
      # summable array is gathered with the others, which saves a collective.
      is_small = math.prod(like.shape) <= _MAX_JOINED_ELEMENTS
      joins = workers == 2 and not all(summed) and is_small
      methods.append("gather" if joins else "sum")
    else:
      methods.append(method if is_sharded(like, workers) else "gather")
  return methods
