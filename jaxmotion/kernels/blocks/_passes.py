"""The four block passes, written once for the kernels of every backend.

A pass reads arrays and payloads, combines them to float32 values, and writes
the values, their payload, or both. A backend runs a pass tile by tile.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op, _error_memory


class Pass(NamedTuple):
  """Pass over the tiles of an array: its inputs, and what it makes of them."""

  name: str
  op: _block_op.BlockOp
  like: ShapedLike  # Shape and dtype of the array.
  # (decoded, count, *arrays) -> float32 values of a tile. Each argument is a
  # function that loads its part: the values of the payload, the number of
  # encodings, and each of `arrays`.
  combine: Callable[..., Array]
  arrays: Sequence[Array] = ()  # Arrays of the shape of `like`.
  counts: Sequence[Array] = ()  # int32[1], the number of encodings, or nothing.
  # Leaves of the payload that is decoded, or nothing.
  payload: Sequence[Array] = ()
  # uint32[1] for an op that draws random numbers, or nothing.
  seed: Sequence[Array] = ()
  # Number of workers whose payloads are stacked; None for a payload without
  # that axis.
  workers: int | None = None
  writes_values: bool = False  # Whether the values are written.
  writes_payload: bool = True  # Whether the payload of the values is written.

  @property
  def kernel_name(self) -> str:
    """Name of the kernel: the pass and the op."""
    op = type(self.op).__name__.removesuffix("Op").lower()
    return f"{self.name}_{op}"

  @property
  def needs_full_blocks(self) -> bool:
    """Whether what is decoded is encoded, which padding would take part in."""
    return self.writes_payload and bool(self.payload)

  @property
  def aliases(self) -> dict[int, int]:
    """Inputs in whose place outputs are written: the parts of a memory."""
    # Safe because a tile writes exactly the entries that it has read.
    if not (self.writes_values and self.writes_payload):
      return {}
    leaves = len(self.payload)
    return {1: leaves, **{3 + i: i for i in range(leaves)}}

  def split_refs(self, refs: Sequence[Any]) -> list[Sequence[Any]]:
    """Returns the references of arrays, count, payload, seed and outputs."""
    inputs = self.arrays, self.counts, self.payload, self.seed
    ends = [0, *itertools.accumulate(map(len, inputs)), len(refs)]
    return [refs[start:end] for start, end in itertools.pairwise(ends)]

  def round_decoded(self, y: Array) -> Array:
    """Returns decoded values as the reference adds them."""
    # It decodes to the array's dtype before it adds in float32.
    return core.saturate_cast(y, self.like.dtype).astype(jnp.float32)

  def add_workers(self, decode: Callable[[Any], Array]) -> Array:
    """Returns the values of the payload, or their sum over the workers."""
    if self.workers is None:
      return decode(0)
    return _error_memory.add_in_order(
      lambda worker: self.round_decoded(decode(worker)),
      self.workers,
      _error_memory.MAX_UNROLL_IN_KERNEL,
    )


class Passes(NamedTuple):
  """The block passes by the kernels of one backend.

  Attributes:
    run: function from a pass to the payload and the values that it writes.
  """

  run: Callable[[Pass], tuple[PyTree, Any]]

  def encode(
    self, x: Array, key: core.Key | None, *, op: _block_op.BlockOp
  ) -> PyTree:
    """Encodes an array with one kernel that reads it once."""
    load_array = lambda decoded, count, x: x()
    seed = _list_seed(op, key)
    payload, _ = self.run(
      Pass("encode", op, x, load_array, arrays=[x], seed=seed)
    )
    return payload

  def encode_error(
    self,
    x: Array,
    memory: _error_memory.ErrorMemory,
    key: core.Key | None,
    *,
    op: _block_op.BlockOp,
    decay: float,
  ) -> tuple[PyTree, Array]:
    """Encodes an array plus its error with one kernel, in place."""
    sent = jax.tree.leaves(memory.sent)
    if not sent:
      raise NotImplementedError("the memory must hold a payload")

    def add_error(
      decoded: Callable[[], Array],
      count: Callable[[], Array],
      x: Callable[[], Array],
      value: Callable[[], Array],
    ) -> Array:
      """Adds the error of the last payload to a tile; 0 before the first."""
      y = decoded()
      error = _error_memory.clear_error(value() - y)
      error = jnp.where(count() > 0, error, 0.0)
      return x() + error * decay

    return self.run(
      Pass(
        "encode_error",
        op,
        x,
        add_error,
        arrays=[x, memory.value],
        counts=[memory.count.reshape(1)],
        payload=sent,
        seed=_list_seed(op, key),
        writes_values=True,
      )
    )

  def sum_decoded(
    self, payloads: PyTree, *, op: _block_op.BlockOp, like: ShapedLike
  ) -> Array:
    """Decodes and adds payloads of several workers with one kernel."""
    leaves = jax.tree.leaves(payloads)
    _, total = self.run(
      Pass(
        "sum",
        op,
        like,
        lambda decoded, count: decoded(),
        payload=leaves,
        workers=leaves[0].shape[0],
        writes_values=True,
        writes_payload=False,
      )
    )
    return total

  def encode_mean(
    self,
    payloads: PyTree,
    key: core.Key | None,
    *,
    op: _block_op.BlockOp,
    like: ShapedLike,
  ) -> PyTree:
    """Decodes payloads of several workers and encodes their mean, at once."""
    leaves = jax.tree.leaves(payloads)
    workers = leaves[0].shape[0]
    # The kernel multiplies by 1 / workers, which equals the reference's
    # division for a power of two of workers only. An array of the mean never
    # exists, so its dtype must be the float32 of the registers.
    if workers & (workers - 1) or like.dtype != jnp.float32:
      raise NotImplementedError(
        "the mean must be float32, of a power of two of workers, got "
        f"{jnp.dtype(like.dtype).name} of {workers}"
      )
    payload, _ = self.run(
      Pass(
        "encode_mean",
        op,
        like,
        lambda decoded, count: decoded() * jnp.float32(1 / workers),
        payload=leaves,
        seed=_list_seed(op, key),
        workers=workers,
      )
    )
    return payload


def check_values(like: ShapedLike) -> None:
  """Raises NotImplementedError unless float32 holds all values of a dtype."""
  if jnp.promote_types(like.dtype, jnp.float32) != jnp.float32:
    raise NotImplementedError(
      f"values must fit in float32, got {jnp.dtype(like.dtype).name}"
    )


def _list_seed(op: _block_op.BlockOp, key: core.Key | None) -> list[Array]:
  if not op.needs_key:
    return []
  assert key is not None
  return [key.worker.reshape(1)]
