"""Codecs that send the largest elements of every block or column."""

import abc
import dataclasses
import math
from typing import Any, ClassVar, NamedTuple

import jax

from jaxmotion import core, hosts, kernels
from jaxmotion.codecs import _bases, _checks, _division, _laws
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import pack, select

# Fewer selected elements are unpacked where they are read.
_MIN_UNPACKED = 1 << 10


class Sparse(NamedTuple):
  """Payload of selected elements and their places."""

  # float32[k * blocks], the largest of every block first.
  values: Array
  # uint32[rows, columns], places in the block in the bits that they need, up to
  # 8 in a power of two.
  indices: Array


def _selection_laws(contraction: float) -> _laws.Laws:
  """Returns the laws of a codec that sends some elements and zeroes others."""
  # contraction: least share of the squared norm that is kept. The largest
  # elements have no less of it than their share of the number. An element that
  # is zeroed is wrong by all of its value, so the relative error is 1.
  return dataclasses.replace(
    _laws.ROUNDED,
    projects=True,
    contraction=contraction,
    error=_laws.ErrorBound(relative=1.0, floor=_laws.LEAST_FLOAT32),
    nonfinite="array",
  )


class SparseCodec(_bases.ArrayCodec):
  """Codec that sends the largest elements of every block, and their places."""

  @abc.abstractmethod
  def _block_shape(self, like: ShapedLike) -> tuple[int, int]:
    """Returns (block length, elements kept of it)."""

  def _encode(self, x: Array, key: core.Key | None) -> Sparse:
    block, k = self._block_shape(x)
    values, places = select.topk_select(x, k, block)
    return _pack(values, places, block)

  def _decode(self, payload: Sparse, like: ShapedLike) -> Array:
    return _scatter(payload, like, *self._block_shape(like))

  def _sum_decoded(self, payloads: Sparse, like: ShapedLike) -> Array:
    block, k = self._block_shape(like)
    values, places = jax.vmap(lambda one: _unpack(one, block, k))(payloads)
    return select.topk_sum(values, places, like, block)


@dataclasses.dataclass(frozen=True)
class SparseDivision(_division.Division):
  """Divides blocks of selected elements between workers."""

  k: int  # Elements kept of each block.

  payload_type: ClassVar[Any] = Sparse

  def to_blocks(self, payload: Sparse) -> tuple[Array, Array]:
    """Returns the values of blocks and their places, (k, blocks) each."""
    return _unpack(payload, self.like.shape[0], self.k)

  def from_blocks(self, leaves: tuple[Array, Array]) -> Sparse:
    """Returns the payload of values and places."""
    return _pack(*leaves, self.like.shape[0])


def _pack(values: Array, places: Array, block: int) -> Sparse:
  """Returns the payload of values and places, (k, blocks) each."""
  words = pack.pack_flat(places, _place_bits(block))
  return Sparse(values.reshape(-1), words)


def _unpack(payload: Sparse, block: int, k: int) -> tuple[Array, Array]:
  """Unpacks a payload to values and their places in a block, (k, blocks)."""
  size, bits = payload.values.size, _place_bits(block)
  dtype = next(f"uint{n}" for n in (8, 16, 32) if bits <= n)
  unpack = lambda words: pack.unpack_flat(words, bits, size, dtype)
  if size >= _MIN_UNPACKED:
    # Every element of the array reads its place: XLA:CPU would unpack all of
    # them again, `block` times, and without vectors. Narrow places are read
    # from a nearer cache (1.6x).
    places = hosts.write_apart(unpack, payload.indices)
  else:
    places = unpack(payload.indices)
  shape = k, size // k
  return payload.values.reshape(shape), places.reshape(shape)


def _scatter(payload: Sparse, like: ShapedLike, block: int, k: int) -> Array:
  """Returns zeros with the elements of a payload at their places."""
  values, places = _unpack(payload, block, k)
  return select.topk_scatter(values, places, like, block)


def _place_bits(block: int) -> int:
  """Returns the bits of a place in a block."""
  bits = max(1, (block - 1).bit_length())
  # A power of two decodes by one shift. Of larger blocks fewer places are sent,
  # so that their bits count more than the time to unpack them.
  return bits if bits > 8 else 1 << (bits - 1).bit_length()


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  density=_checks.FRACTION, block=core.optional(kernels.check_block)
)
class topk(SparseCodec):
  """Keeps the elements of largest magnitude of every block of an array.

  encode(x) = the k largest |x| of each block with their places in it; decode
  puts them back among zeros. Block j of B holds elements j, j + B, j + 2 B, ...
  of the flat array: neighbors are of different blocks and are compared by
  the same vector instruction.

  Properties: exact (no sampled threshold); a contraction,
  ||x - decode(encode(x))||^2 <= (1 - k / block) ||x||^2: use it with
  `feedback`. Idempotent. NaN counts as larger than any value, so it is sent on
  rather than hidden.

  Args:
    density: share of the elements that is sent, in (0, 1].
    block: number of elements in a block; k = max(1, round(density * block)).
      None keeps one value of each block and makes a block of about 1 / density
      values. A size within 1.5x of that is preferred if it cuts the array into
      rows or fractions of one (128 for 2048 rows at 1 %). Otherwise the size is
      round(1 / density). Runs that follow the rows decode 10x faster on
      XLA:CPU.

  Example:
    >>> x = jnp.array([0.1, -3.0, 2.0, 0.5])
    >>> codec = topk(density=0.5)
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist()
    [0.0, -3.0, 2.0, 0.0]

  References:
    Stich, Cordonnier and Jaggi, *Sparsified SGD with Memory*, 2018.
  """

  density: float
  block: int | None = None

  def _make_laws(self) -> _laws.Laws:
    # Blocks of an odd length, or that follow the rows, keep a share of their
    # elements down to two thirds of the density.
    return _selection_laws(self.density * 0.66)

  def _encode_error(
    self,
    x: Array,
    memory: kernels.ErrorMemory,
    state: PyTree,
    key: core.Key | None,
    decay: float,
  ) -> tuple[Sparse, Array, PyTree]:
    """Encodes x plus the error of the last payload, which `memory` holds."""
    # The sum is returned, too: it is what the next call remembers. Here the
    # error is decoded in the layout of the blocks, in the pass that adds it.
    self._check_input(x, key, state)
    block, k = self._block_shape(x)
    blocks = kernels.plane_length(tuple(x.shape), block)

    # `like` has the shape of the blocks, which would have others of its own.
    decode = lambda payload, like: _scatter(payload, like, block, k)
    value = kernels.add_error_in_blocks(
      decode, x, memory, decay, (block, 1, blocks)
    )
    return self._encode(value, key), value, state

  def _divide(
    self, like: ShapedLike, workers: int
  ) -> _division.Division | None:
    """Divides the blocks between workers if a part has blocks of that shape."""
    # Each worker has the elements of some blocks.
    block, k = self._block_shape(like)
    blocks = kernels.plane_length(tuple(like.shape), block)
    each = kernels.plane_length((-(-blocks // workers) * block,), block)
    part = jax.ShapeDtypeStruct((block, each), like.dtype)
    if not blocks or self._block_shape(part) != (block, k):
      return None
    return SparseDivision(part, tuple(like.shape), blocks, workers, k)

  def _block_shape(self, like: ShapedLike) -> tuple[int, int]:
    block = self.block or kernels.nearest_planes(like.shape, 1 / self.density)
    block = max(1, min(block, math.prod(like.shape)))
    return block, 1 if self.block is None else max(
      1, round(self.density * block)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
@core.declare(
  count=core.optional(core.integer(1, 2**31 - 1)),
  density=core.optional(_checks.FRACTION),
)
class topk_columns(SparseCodec):
  """Keeps the elements of largest magnitude of every column of an array.

  A column has the elements that differ in their first index alone. A vector is
  one column, and `tiles` and `dct` make one of each tile. `topk` has blocks of
  a length that does not depend on the array; it is faster.

  Properties: those of `topk`. With a density it is a contraction,
  ||x - decode(encode(x))||^2 <= (1 - density) ||x||^2.

  Args:
    count: number of elements of a column that are sent; all of a shorter one.
    density: share of a column that is sent, rounded up to whole elements.
      Either this or `count` is given.

  Example:
    >>> x = jnp.array([[0.1, -3.0], [2.0, 0.5]])
    >>> codec = topk_columns(count=1)
    >>> payload, _ = codec.encode(x)
    >>> codec.decode(payload, x).tolist()
    [[0.0, -3.0], [2.0, 0.0]]
  """

  count: int | None = None
  density: float | None = None

  def __post_init__(self) -> None:
    if (self.count is None) == (self.density is None):
      raise ValueError(
        "`count` must be given if `density` is not, and only then, got "
        f"{self.count!r} and density {self.density!r}."
      )

  def _make_laws(self) -> _laws.Laws:
    return _selection_laws(0.999 * (self.density or 0.0))

  def _block_shape(self, like: ShapedLike) -> tuple[int, int]:
    length = max(1, like.shape[0] if like.shape else 1)
    if self.count is not None:
      return length, min(self.count, length)
    return length, math.ceil((self.density or 0.0) * length)
