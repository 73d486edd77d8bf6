"""Block passes as Pallas kernels for TPUs, by tiles of rows of all planes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.core import Array, Key, PyTree, ShapedLike
from jaxmotion.kernels._block_op import BlockOp, Tile
from jaxmotion.kernels._error_memory import ErrorMemory, clear_error
from jaxmotion.kernels.blocks._passes import (
  check_mean,
  count_workers,
  op_name,
  round_decoded,
)
from jaxmotion.kernels.blocks._tpu_tiles import (
  Grid,
  Operand,
  call_tiles,
  join_payload,
  load_payload,
  make_grid,
  make_tile,
  payload_operands,
  program_id,
  run_if,
  store_payload,
  values_operand,
)


def encode(
  x: Array, key: Key | None, *, op: BlockOp, interpret: bool = False
) -> PyTree:
  """Encodes an array with one kernel that reads it once."""
  grid = make_grid(op, x, by_rows=True)

  def kernel(seed_ref: Any, x_ref: Any, *payload_refs: Any) -> None:
    values = x_ref[...].astype(jnp.float32)
    leaves = op.encode_tile(values, make_tile(grid), _load_seed(op, seed_ref))
    store_payload(payload_refs, op, grid, leaves)

  inputs = [_seed_operand(op, key), values_operand(x, grid)]
  outputs = payload_operands(grid.payload, op, grid)
  found = call_tiles(
    kernel, f"encode_{op_name(op)}", grid, inputs, outputs, interpret=interpret
  )
  return join_payload(found, op, grid)


def encode_error(
  x: Array,
  memory: ErrorMemory,
  key: Key | None,
  *,
  op: BlockOp,
  decay: float,
  interpret: bool = False,
) -> tuple[PyTree, Array]:
  """Encodes an array plus its error with one kernel that updates the memory.

  The new value and the new words overwrite the old ones (`aliases`). That is
  safe because a tile writes exactly the entries that it has read.
  """
  grid = make_grid(op, x, by_rows=True)
  if not jax.tree.leaves(memory.sent):
    raise NotImplementedError("the memory must hold a payload")
  sent = payload_operands(memory.sent, op, grid)

  def kernel(seed_ref: Any, count_ref: Any, *refs: Any) -> None:
    x_ref, value_ref, *others, v_ref = refs
    sent_refs, payload_refs = others[: len(sent)], others[len(sent) :]
    tile = make_tile(grid)
    decoded = op.decode_tile(load_payload(sent_refs, op, grid), tile)
    error = clear_error(value_ref[...] - decoded)
    error = jnp.where(count_ref[0] > 0, error, 0.0)
    v = x_ref[...].astype(jnp.float32) + error * decay
    v_ref[...] = v
    leaves = op.encode_tile(v, tile, _load_seed(op, seed_ref))
    store_payload(payload_refs, op, grid, leaves)

  value = values_operand(memory.value, grid)
  count = Operand(memory.count.reshape(1), None)
  inputs = [_seed_operand(op, key), count, values_operand(x, grid), value]
  words = [i for i, leaf in enumerate(op.leaf_layouts()) if leaf.per_element]
  *found, v = call_tiles(
    kernel,
    f"encode_error_{op_name(op)}",
    grid,
    [*inputs, *sent],
    [*payload_operands(grid.payload, op, grid), value],
    aliases={3: len(sent), **{4 + i: i for i in words}},
    interpret=interpret,
  )
  return join_payload(found, op, grid), v.reshape(x.shape)


def sum_decoded(
  payloads: PyTree, *, op: BlockOp, like: ShapedLike, interpret: bool = False
) -> Array:
  """Decodes and adds payloads of several workers with one kernel."""
  grid = make_grid(op, like, by_rows=False)

  def kernel(*refs: Any) -> None:
    _add_worker(refs[:-1], refs[-1], op, grid, make_tile(grid), like.dtype)

  total = jax.ShapeDtypeStruct(like.shape, jnp.float32)
  (found,) = call_tiles(
    kernel,
    f"sum_{op_name(op)}",
    grid,
    payload_operands(payloads, op, grid, stacked=True),
    [values_operand(total, grid)],
    workers=count_workers(payloads),
    interpret=interpret,
  )
  return found.reshape(like.shape)


def encode_mean(
  payloads: PyTree,
  key: Key | None,
  *,
  op: BlockOp,
  like: ShapedLike,
  interpret: bool = False,
) -> PyTree:
  """Decodes payloads of several workers and encodes their mean, in one kernel.

  The mean is the sum times 1 / workers (`check_mean`).
  """
  grid = make_grid(op, like, by_rows=False)
  workers = count_workers(payloads)
  check_mean(workers, like)
  coded = payload_operands(payloads, op, grid, stacked=True)

  def kernel(seed_ref: Any, *refs: Any) -> None:
    *others, total_ref = refs
    coded_refs, payload_refs = others[: len(coded)], others[len(coded) :]
    tile, worker = make_tile(grid), program_id(2)
    _add_worker(coded_refs, total_ref, op, grid, tile, like.dtype)

    @run_if(worker == workers - 1)
    def _() -> None:
      mean = total_ref[...] * jnp.float32(1 / workers)
      leaves = op.encode_tile(mean, tile, _load_seed(op, seed_ref))
      store_payload(payload_refs, op, grid, leaves)

  found = call_tiles(
    kernel,
    f"encode_mean_{op_name(op)}",
    grid,
    [_seed_operand(op, key), *coded],
    payload_operands(grid.payload, op, grid),
    workers=workers,
    has_total=True,
    interpret=interpret,
  )
  return join_payload(found, op, grid)


def _seed_operand(op: BlockOp, key: Key | None) -> Operand:
  """Returns the seed of random numbers, 0 for an op that draws none."""
  if not op.needs_key:
    return Operand(jnp.zeros(1, jnp.uint32))
  assert key is not None
  return Operand(key.worker.reshape(1))


def _load_seed(op: BlockOp, ref: Any) -> Array | None:
  return ref[0] if op.needs_key else None


def _add_worker(
  refs: Sequence[Any],
  total_ref: Any,
  op: BlockOp,
  grid: Grid,
  tile: Tile,
  dtype: Any,
) -> None:
  """Adds the values of the running kernel's worker to a tile's total."""
  worker = program_id(2)
  y = op.decode_tile(load_payload(refs, op, grid), tile)
  y = round_decoded(y, dtype)

  @run_if(worker == 0)
  def _() -> None:
    total_ref[...] = y

  @run_if(worker > 0)
  def _() -> None:
    total_ref[...] += y
