"""Base class of codecs whose payload is one pass over blocks."""

import abc
import dataclasses

from jaxmotion import core, kernels
from jaxmotion.codecs import _codec, _division
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import blocks


@dataclasses.dataclass(frozen=True)
class BlockCodec(_codec.Codec):
  """Base of codecs whose payload a kernel computes in one pass.

  A subclass defines `kernel_op`. Encoding, error memory, sums and means of
  payloads are the same for all.
  """

  @property
  @abc.abstractmethod
  def kernel_op(self) -> kernels.BlockOp:
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
    self, x: Array, state: PyTree = (), key: core.Key | None = None
  ) -> tuple[PyTree, PyTree]:
    """Returns words and scales, and the unchanged state."""
    self._check_input(x, key, state)
    payload = blocks.encode_pass(x, self._used_key(key), op=self.kernel_op)
    return payload, state

  def encode_error(
    self,
    x: Array,
    memory: kernels.ErrorMemory,
    state: PyTree = (),
    key: core.Key | None = None,
    *,
    decay: float = 1.0,
  ) -> tuple[PyTree, Array, PyTree]:
    """Encodes `x` plus its remembered error, in the same pass."""
    self._check_input(x, key, state)
    _codec.check_error_memory(x, memory, decay)
    payload, value = blocks.encode_error_pass(
      x,
      memory,
      self._used_key(key),
      op=self.kernel_op,
      decay=decay,
    )
    return payload, value, state

  def encode_mean(
    self,
    payloads: PyTree,
    like: ShapedLike,
    state: PyTree = (),
    key: core.Key | None = None,
  ) -> tuple[PyTree, PyTree]:
    """Encodes the mean of several workers' payloads, in the same pass."""
    self._check_payload(payloads, like, stacked=True)
    self._check_input(like, key, state)
    payload = blocks.mean_pass(
      payloads,
      self._used_key(key),
      op=self.kernel_op,
      like=like,
    )
    return payload, state

  def sum_decoded(self, payloads: PyTree, like: ShapedLike) -> Array:
    """Decodes and adds payloads of several workers, in the same pass."""
    self._check_payload(payloads, like, stacked=True)
    return blocks.sum_pass(payloads, op=self.kernel_op, like=like)

  def decode(self, payload: PyTree, like: ShapedLike) -> Array:
    """Returns the levels that the codes stand for."""
    self._check_payload(payload, like)
    return blocks.decode_pass(payload, op=self.kernel_op, like=like)

  def division(
    self, like: ShapedLike, workers: int
  ) -> _division.Division | None:
    """Returns how blocks are divided between workers, or None."""
    super().division(like, workers)
    return _division.divide_blocks(self.kernel_op, like, workers)

  def payload_like(self, like: ShapedLike) -> PyTree:
    """Returns the payload of an array, its leaves as ShapeDtypeStructs.

    Args:
      like: shape and dtype of the array.
    """
    _codec.check_shaped("like", like)
    return kernels.describe_payload(self.kernel_op, like)

  def _used_key(self, key: core.Key | None) -> core.Key | None:
    return key if self.needs_key else None
