"""A bit for every value and a word for every value that is not zero."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs._base import Codec
from jaxmotion.core import Array, Key, Like, PyTree, check_fraction
from jaxmotion.kernels.compact import compact, expand, mark, starts

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class NonZeros(NamedTuple):
  """The words that are not zero and where they stood.

  Attributes:
    mask: uint32[ceil(n / 32)], bit i of word g is value 32 g + i.
    words: uint8, uint16 or uint32[k], the bits of the values in order, zeros
      after the last.
    overflow: uint32[], the number of words that did not fit.
  """

  mask: Array
  words: Array
  overflow: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class zero_value(Codec):
  """Leaves zeros out (ZVC): what rectifiers and pruning make, without loss.

  encode(x) = (bits(x) != 0, the first k non-zero words in order) with
  k = max(1, round(capacity * n)); decode puts the words back among zeros.

  Laws: lossless bit for bit where `overflow` is 0, NaN, infinity, subnormals
  and -0.0 (whose sign bit is a word that is not zero) included; idempotent.
  Where more than k words are not zero, the last ones in order decode to zero
  and `overflow` says how many: a caller who needs the exact values reads it
  and takes another way (recompute, send plainly). At a share s of zeros the
  ratio is 1 / (capacity + 1/32) in float32 and no overflow as long as
  capacity >= 1 - s.

  Args:
    capacity: share of the values that has room, in (0, 1]; 1 never overflows.

  Example:
    >>> x = jnp.array([0.0, 2.0, 0.0, -1.0])
    >>> codec = zero_value(capacity=0.5)
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist(), int(payload.overflow)
    ([0.0, 2.0, 0.0, -1.0], 0)

  References:
    Rhu et al., *Compressing DMA Engine: Leveraging Activation Sparsity for
    Training Deep Neural Networks*, 2018.
  """

  capacity: float

  def __post_init__(self) -> None:
    check_fraction("capacity", self.capacity)

  @property
  def keeps_dtype(self) -> bool:
    """True: a narrow float travels as it is."""
    return True

  def encode(
    self, x: Array, state: PyTree = (), key: Key | None = None
  ) -> tuple[NonZeros, PyTree]:
    """Returns the mask, the words and the overflow, and the state."""
    self._check(x, key)
    words = lax.bitcast_convert_type(x, _word(x)).reshape(-1)
    mask = mark(words != 0)
    start, k = starts(mask), self._capacity(x)
    overflow = jnp.maximum(start[-1] - k, 0).astype(jnp.uint32)
    # Plain moves, so floats of 32 bits keep theirs; a bit cast fused with the
    # scatter costs 3x on XLA:CPU.
    moved = x.reshape(-1) if x.dtype == jnp.float32 else words
    packed = lax.bitcast_convert_type(
      compact(moved, mask, start, k), words.dtype
    )
    return NonZeros(mask, packed, overflow), state

  def decode(self, payload: NonZeros, like: Like) -> Array:
    """Returns the words among zeros, in the dtype that was encoded."""
    self._check_payload(payload, like)
    size = math.prod(like.shape)
    words = expand(payload.words, payload.mask, starts(payload.mask), size)
    return lax.bitcast_convert_type(words.reshape(like.shape), like.dtype)

  def _capacity(self, like: Like) -> int:
    size = math.prod(like.shape)
    return min(size, max(1, round(self.capacity * size)))


def _word(like: Like) -> jnp.dtype:
  return jnp.dtype(_WORDS[jnp.dtype(like.dtype).itemsize])
