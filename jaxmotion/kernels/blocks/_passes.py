"""A pass over the blocks of an array, as a kernel runs it.

A pass reads arrays and payloads, combines them to float32 values, and writes
the values, their payload, or both. `_pallas_triton` runs it tile by tile.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
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
