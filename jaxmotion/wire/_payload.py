"""Bytes of payloads, from traced shapes."""

import math

import jax

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec, partition
from jaxmotion.core import PyTree


def payload_bytes(codec: codecs.Codec, like: PyTree) -> int:
  """Returns the bytes of the payloads of a tree, from their traced shapes.

  Args:
    codec: any codec.
    like: pytree of floating-point arrays or ShapeDtypeStructs.

  Returns:
    Bytes of all payload buffers of one worker, scales and indices included.

  Raises:
    TypeError: `codec` is not a codec, or a leaf is not floating-point.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> payload_bytes(codecs.uniform(bits=4, block=512), jnp.zeros(4096))
    2080
  """
  check_codec("codec", codec, trees=True)
  core.check_arrays("like", like, numbers=False)
  for path, leaf in core.named_leaves(like):
    core.check_float(f"like/{path}" if path else "like", leaf)
  cut = partition(codec, like)
  return sum(
    math.prod(a.shape) * a.dtype.itemsize
    for part, array in zip(cut.leaf_groups, cut.array_likes(), strict=True)
    for a in jax.tree.leaves(part.codec.payload_like(array))
  )
