"""Base class of codecs whose payload is one pass over blocks."""

import abc
import dataclasses

import jax

from jaxmotion.codecs._arguments import check_error_memory, check_shaped
from jaxmotion.codecs._codec import Codec
from jaxmotion.core import Array, Key, PyTree, ShapedLike
from jaxmotion.kernels import BlockOp, ErrorMemory, blocks

# Shape of the array whose payload shows the layout of all payloads.
_SAMPLE_SHAPE = (64, 1024)


@dataclasses.dataclass(frozen=True)
class BlockCodec(Codec):
  """Base of codecs whose payload a kernel computes in one pass.

  A subclass defines `kernel_op`. Encoding, error memory, sums and means of
  payloads are the same for all.
  """

  @property
  @abc.abstractmethod
  def kernel_op(self) -> BlockOp:
    """The kernel op of this codec, built once per codec.

    A subclass defines it by `functools.cached_property`, which writes to the
    instance's `__dict__`, as a frozen dataclass permits. The op is no field:
    `repr`, equality, hash and `config` do not see it.
    """

  @property
  def needs_key(self) -> bool:
    """Whether rounding is stochastic."""
    return self.kernel_op.needs_key

  def encode(
    self, x: Array, state: PyTree = (), key: Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Returns words and scales, and the unchanged state."""
    self._check_input(x, key, state)
    return blocks.encode(self.kernel_op, x, self._used_key(key)), state

  def encode_error(
    self,
    x: Array,
    memory: ErrorMemory,
    state: PyTree = (),
    key: Key | None = None,
    *,
    decay: float = 1.0,
  ) -> tuple[PyTree, Array, PyTree]:
    """Encodes `x` plus its remembered error, in the same pass."""
    self._check_input(x, key, state)
    check_error_memory(x, memory, decay)
    payload, value = blocks.encode_error(
      self.kernel_op, x, memory, self._used_key(key), decay=decay
    )
    return payload, value, state

  def encode_mean(
    self,
    payloads: PyTree,
    like: ShapedLike,
    state: PyTree = (),
    key: Key | None = None,
  ) -> tuple[PyTree, PyTree]:
    """Encodes the mean of several workers' payloads, in the same pass."""
    self._check_payload(payloads, like, stacked=True)
    self._check_input(like, key, state)
    payload = blocks.encode_mean(
      self.kernel_op, payloads, like, self._used_key(key)
    )
    return payload, state

  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Decodes and adds payloads of several workers, in the same pass."""
    self._check_payload(payloads, like, stacked=True)
    return blocks.sum_decoded(self.kernel_op, payloads, like)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Returns the levels that the codes stand for."""
    self._check_payload(payload, like)
    return blocks.decode(self.kernel_op, payload, like)

  def payload_like(self, like: ShapedLike) -> PyTree:
    """Returns the payload of an array, its leaves as ShapeDtypeStructs.

    A program has arrays of many shapes, and to trace an encoder takes 10 ms. So
    where the payload of one sample is laid out in blocks, only the sample is
    traced.

    Args:
      like: shape and dtype of the array.
    """
    check_shaped("like", like)
    sample = jax.ShapeDtypeStruct(_SAMPLE_SHAPE, like.dtype)
    try:
      shapes = self._leaf_shapes(tuple(like.shape))
      sample_shapes = self._leaf_shapes(_SAMPLE_SHAPE)
    except NotImplementedError:
      return super().payload_like(like)
    leaves, tree = jax.tree.flatten(super().payload_like(sample))
    if [leaf.shape for leaf in leaves] != sample_shapes:
      return super().payload_like(like)
    pairs = zip(leaves, shapes, strict=True)
    found = [jax.ShapeDtypeStruct(shape, leaf.dtype) for leaf, shape in pairs]
    return jax.tree.unflatten(tree, found)

  def _leaf_shapes(self, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the shapes of a payload that is laid out in blocks.

    Raises:
      NotImplementedError: it is not.
    """
    layout = self.kernel_op.layout(shape)
    return [layout.leaf_shape(leaf) for leaf in self.kernel_op.leaf_layouts()]

  def _used_key(self, key: Key | None) -> Key | None:
    return key if self.needs_key else None
