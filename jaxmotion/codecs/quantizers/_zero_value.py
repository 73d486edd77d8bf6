"""The codec `zero_value`: a bitmap, and the words that are not zero."""

import dataclasses
import math

from jaxmotion import core
from jaxmotion.codecs import _codec, _laws
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import compact

_TILES = (32, 64, 128, 256, 512, 1024)


@dataclasses.dataclass(frozen=True, kw_only=True)
class zero_value(_codec.Codec):
  """Leaves out the zeros that ReLU and pruning produce, without loss (ZVC).

  encode(x) = for each tile of the flat array, (bits(x) != 0, the first k
  non-zero words in order, their number), k = max(1, round(capacity * tile)).
  Decode puts the words back among zeros.

  Properties: lossless bit for bit where `payload.overflow` is 0, NaN, infinity,
  subnormals and -0.0 (whose sign bit is a word that is not zero) included;
  idempotent. If more than k words of a tile are not zero, the last ones in
  order decode to zero. The tile's count says how many there were. A caller who
  needs the exact values reads the overflow and takes another way (recompute,
  send plainly). The ratio is 1 / (capacity + 1/32 + 1/tile) in float32. At a
  share s of zeros that are spread at random, a tile has (1 - s) tile other
  values. Their standard deviation is sqrt(s (1 - s) tile). So give the capacity
  some such deviations more than 1 - s.

  Args:
    capacity: share of a tile's elements that has a slot, in (0, 1]; 1 never
      overflows.
    tile: number of elements compacted together, a power of two from 32 to 1024.
      An array of fewer elements is one tile.

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
  tile: int = 1024

  def __post_init__(self) -> None:
    core.check_number("capacity", self.capacity, 0, 1, open_low=True)
    core.check_int("tile", self.tile, _TILES[0])
    core.check_choice("tile", self.tile, _TILES)

  @property
  def laws(self) -> _laws.Laws:
    """The laws of a lossless codec; its words are no projection."""
    return _laws.LOSSLESS

  def _count_dropped(
    self, payload: compact.NonZeros, like: ShapedLike
  ) -> Array:
    del like
    return payload.overflow

  @property
  def keeps_dtype(self) -> bool:
    """True: a narrow float is sent as it is."""
    return True

  def encode(
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[compact.NonZeros, PyTree]:
    """Returns mask, words and count of every tile, and the state."""
    self._check_input(x, key, state)
    words = core.to_bits(x).reshape(-1)
    return compact.compact_tiles(words, *self._tile_shape(x)), state

  def decode(self, payload: compact.NonZeros, like: ShapedLike) -> Array:
    """Returns the words among zeros, in the dtype that was encoded."""
    self._check_payload(payload, like)
    words = compact.expand_tiles(payload, math.prod(like.shape))
    return core.from_bits(words.reshape(like.shape), like.dtype)

  def _tile_shape(self, like: ShapedLike) -> tuple[int, int]:
    """Returns (elements per tile, words kept of it)."""
    size = min(self.tile, math.prod(like.shape))
    whole = max(32, math.ceil(size / 32) * 32)
    return whole, max(1, round(self.capacity * size))
