"""Block passes as Pallas kernels for TPUs, by tiles of rows of all planes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op, _error_memory
from jaxmotion.kernels.blocks import _passes, _tpu_tiles


def encode(
  x: Array,
  key: core.Key | None,
  *,
  op: _block_op.BlockOp,
  interpret: bool = False,
) -> PyTree:
  """Encodes an array with one kernel that reads it once."""
  grid = _tpu_tiles.make_grid(op, x, by_rows=True)

  def kernel(seed_ref: Any, x_ref: Any, *payload_refs: Any) -> None:
    values = x_ref[...].astype(jnp.float32)
    leaves = op.encode_tile(
      values, _tpu_tiles.make_tile(grid), _load_seed(op, seed_ref)
    )
    _tpu_tiles.store_payload(payload_refs, op, grid, leaves)

  inputs = [_seed_operand(op, key), _tpu_tiles.values_operand(x, grid)]
  outputs = _tpu_tiles.payload_operands(grid.payload, op, grid)
  found = _tpu_tiles.call_tiles(
    kernel,
    f"encode_{_passes.op_name(op)}",
    grid,
    inputs,
    outputs,
    interpret=interpret,
  )
  return _tpu_tiles.join_payload(found, op, grid)


def encode_error(
  x: Array,
  memory: _error_memory.ErrorMemory,
  key: core.Key | None,
  *,
  op: _block_op.BlockOp,
  decay: float,
  interpret: bool = False,
) -> tuple[PyTree, Array]:
  """Encodes an array plus its error with one kernel that updates the memory."""
  # The new value and the new words overwrite the old ones (`aliases`). That is
  # safe because a tile writes exactly the entries that it has read.
  grid = _tpu_tiles.make_grid(op, x, by_rows=True)
  if not jax.tree.leaves(memory.sent):
    raise NotImplementedError("the memory must hold a payload")
  sent = _tpu_tiles.payload_operands(memory.sent, op, grid)

  def kernel(seed_ref: Any, count_ref: Any, *refs: Any) -> None:
    x_ref, value_ref, *others, v_ref = refs
    sent_refs, payload_refs = others[: len(sent)], others[len(sent) :]
    tile = _tpu_tiles.make_tile(grid)
    decoded = op.decode_tile(_tpu_tiles.load_payload(sent_refs, op, grid), tile)
    error = _error_memory.clear_error(value_ref[...] - decoded)
    error = jnp.where(count_ref[0] > 0, error, 0.0)
    v = x_ref[...].astype(jnp.float32) + error * decay
    v_ref[...] = v
    leaves = op.encode_tile(v, tile, _load_seed(op, seed_ref))
    _tpu_tiles.store_payload(payload_refs, op, grid, leaves)

  value = _tpu_tiles.values_operand(memory.value, grid)
  count = _tpu_tiles.Operand(memory.count.reshape(1), None)
  inputs = [
    _seed_operand(op, key),
    count,
    _tpu_tiles.values_operand(x, grid),
    value,
  ]
  words = [i for i, leaf in enumerate(op.leaf_layouts()) if leaf.per_element]
  *found, v = _tpu_tiles.call_tiles(
    kernel,
    f"encode_error_{_passes.op_name(op)}",
    grid,
    [*inputs, *sent],
    [*_tpu_tiles.payload_operands(grid.payload, op, grid), value],
    aliases={3: len(sent), **{4 + i: i for i in words}},
    interpret=interpret,
  )
  return _tpu_tiles.join_payload(found, op, grid), v.reshape(x.shape)


def sum_decoded(
  payloads: PyTree,
  *,
  op: _block_op.BlockOp,
  like: ShapedLike,
  interpret: bool = False,
) -> Array:
  """Decodes and adds payloads of several workers with one kernel."""
  grid = _tpu_tiles.make_grid(op, like, by_rows=False)

  def kernel(*refs: Any) -> None:
    _add_worker(
      refs[:-1], refs[-1], op, grid, _tpu_tiles.make_tile(grid), like.dtype
    )

  total = jax.ShapeDtypeStruct(like.shape, jnp.float32)
  (found,) = _tpu_tiles.call_tiles(
    kernel,
    f"sum_{_passes.op_name(op)}",
    grid,
    _tpu_tiles.payload_operands(payloads, op, grid, stacked=True),
    [_tpu_tiles.values_operand(total, grid)],
    workers=_passes.count_workers(payloads),
    interpret=interpret,
  )
  return found.reshape(like.shape)


def encode_mean(
  payloads: PyTree,
  key: core.Key | None,
  *,
  op: _block_op.BlockOp,
  like: ShapedLike,
  interpret: bool = False,
) -> PyTree:
  """Decodes payloads of several workers and encodes their mean, in one
  kernel."""
  # The mean is the sum times 1 / workers (`check_mean`).
  grid = _tpu_tiles.make_grid(op, like, by_rows=False)
  workers = _passes.count_workers(payloads)
  _passes.check_mean(workers, like)
  coded = _tpu_tiles.payload_operands(payloads, op, grid, stacked=True)

  def kernel(seed_ref: Any, *refs: Any) -> None:
    *others, total_ref = refs
    coded_refs, payload_refs = others[: len(coded)], others[len(coded) :]
    tile, worker = _tpu_tiles.make_tile(grid), _tpu_tiles.program_id(2)
    _add_worker(coded_refs, total_ref, op, grid, tile, like.dtype)

    @_tpu_tiles.run_if(worker == workers - 1)
    def _() -> None:
      mean = total_ref[...] * jnp.float32(1 / workers)
      leaves = op.encode_tile(mean, tile, _load_seed(op, seed_ref))
      _tpu_tiles.store_payload(payload_refs, op, grid, leaves)

  found = _tpu_tiles.call_tiles(
    kernel,
    f"encode_mean_{_passes.op_name(op)}",
    grid,
    [_seed_operand(op, key), *coded],
    _tpu_tiles.payload_operands(grid.payload, op, grid),
    workers=workers,
    has_total=True,
    interpret=interpret,
  )
  return _tpu_tiles.join_payload(found, op, grid)


def _seed_operand(
  op: _block_op.BlockOp, key: core.Key | None
) -> _tpu_tiles.Operand:
  """Returns the seed of random numbers, 0 for an op that draws none."""
  if not op.needs_key:
    return _tpu_tiles.Operand(jnp.zeros(1, jnp.uint32))
  assert key is not None
  return _tpu_tiles.Operand(key.worker.reshape(1))


def _load_seed(op: _block_op.BlockOp, ref: Any) -> Array | None:
  return ref[0] if op.needs_key else None


def _add_worker(
  refs: Sequence[Any],
  total_ref: Any,
  op: _block_op.BlockOp,
  grid: _tpu_tiles.Grid,
  tile: _block_op.Tile,
  dtype: Any,
) -> None:
  """Adds the values of the running kernel's worker to a tile's total."""
  worker = _tpu_tiles.program_id(2)
  y = op.decode_tile(_tpu_tiles.load_payload(refs, op, grid), tile)
  y = _passes.round_decoded(y, dtype)

  @_tpu_tiles.run_if(worker == 0)
  def _() -> None:
    total_ref[...] = y

  @_tpu_tiles.run_if(worker > 0)
  def _() -> None:
    total_ref[...] += y
