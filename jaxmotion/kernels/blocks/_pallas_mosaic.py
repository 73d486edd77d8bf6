"""Block passes as Mosaic GPU kernels, for NVIDIA GPUs from Hopper on.

They are for the day on which Pallas lowers nothing to Triton any more. None has
run on a GPU, so nothing chooses them by itself.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op, _error_memory
from jaxmotion.kernels.blocks import _mosaic_tiles, _passes, _planes

# Arrays of one plane that encoding or decoding takes, beside its words.
_WORK = 3


def encode(
  x: Array,
  key: core.Key | None,
  *,
  op: _block_op.BlockOp,
  interpret: bool = False,
) -> PyTree:
  """Encodes an array with one kernel that reads it once."""
  live = _WORK + _count_rows(op)
  grid = _mosaic_tiles.make_grid(
    op, x, live=live, reduces=True, interpret=interpret
  )

  def kernel(
    grid: _mosaic_tiles.Grid, seed_ref: Any, x_ref: Any, *payload_refs: Any
  ) -> None:
    pieces = _mosaic_tiles.evaluate(
      _encode_with(op, grid),
      grid,
      _mosaic_tiles.give_values(_mosaic_tiles.load_values(x_ref, grid), grid),
      _mosaic_tiles.give_position(grid),
      _mosaic_tiles.give_scalar(seed_ref),
    )
    _mosaic_tiles.store_payload(payload_refs, op, grid, pieces)

  inputs = [_seed_input(op, key), _split_planes(x, grid)]
  outputs = _mosaic_tiles.payload_shapes(op, grid)
  found = _mosaic_tiles.call_tiles(
    kernel, f"encode_{_passes.op_name(op)}", grid, inputs, outputs
  )
  return _mosaic_tiles.join_payload(found, grid)


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
  # The new value and the new payload overwrite the old ones (`aliases`). That
  # is safe because a tile writes exactly the entries that it has read: hence no
  # tiles that overlap.
  live = _WORK + 4 + 2 * _count_rows(op)
  grid = _mosaic_tiles.make_grid(
    op, x, live=live, reduces=True, interpret=interpret
  )
  if grid.layout.blocks % grid.group:
    raise NotImplementedError(
      f"the blocks of a plane must be a multiple of {grid.group}, got "
      f"{grid.layout.blocks}"
    )
  sent = _mosaic_tiles.split_payload(memory.sent, op, grid)
  if not sent:
    raise NotImplementedError("the memory must hold a payload")

  def encode_sum(
    x: Array,
    value: Array,
    count: Array,
    position: Array,
    seed: Array,
    *sent: Array,
  ) -> Any:
    tile = _mosaic_tiles.make_tile(grid, position)
    error = _error_memory.clear_error(
      value - op.decode_tile(_mosaic_tiles.join_leaves(op, sent), tile)
    )
    v = x + jnp.where(count > 0, error, 0.0) * decay
    return v, _encode_with(op, grid)(v, position, seed)

  def kernel(
    grid: _mosaic_tiles.Grid,
    seed_ref: Any,
    count_ref: Any,
    x_ref: Any,
    value_ref: Any,
    *refs: Any,
  ) -> None:
    *others, v_ref = refs
    sent_refs, payload_refs = others[: len(sent)], others[len(sent) :]
    pieces = _mosaic_tiles.evaluate(
      encode_sum,
      grid,
      _mosaic_tiles.give_values(_mosaic_tiles.load_values(x_ref, grid), grid),
      _mosaic_tiles.give_values(
        _mosaic_tiles.load_values(value_ref, grid), grid
      ),
      _mosaic_tiles.give_scalar(count_ref),
      _mosaic_tiles.give_position(grid),
      _mosaic_tiles.give_scalar(seed_ref),
      *_mosaic_tiles.load_payload(sent_refs, op, grid),
      values=v_ref,
    )
    _mosaic_tiles.store_payload(payload_refs, op, grid, pieces)

  value = _split_planes(memory.value, grid)
  count = memory.count.reshape(1)
  like = jax.ShapeDtypeStruct(value.shape, value.dtype)
  *found, v = _mosaic_tiles.call_tiles(
    kernel,
    f"encode_error_{_passes.op_name(op)}",
    grid,
    [_seed_input(op, key), count, _split_planes(x, grid), value, *sent],
    [*_mosaic_tiles.payload_shapes(op, grid), like],
    aliases={3: len(sent), **{4 + i: i for i in range(len(sent))}},
  )
  return _mosaic_tiles.join_payload(found, grid), v.reshape(x.shape)


def sum_decoded(
  payloads: PyTree,
  *,
  op: _block_op.BlockOp,
  like: ShapedLike,
  interpret: bool = False,
) -> Array:
  """Decodes and adds payloads of several workers with one kernel."""
  workers = _passes.count_workers(payloads)
  live = _WORK + _count_sum(op, like, workers)
  grid = _mosaic_tiles.make_grid(
    op, like, live=live, reduces=False, interpret=interpret
  )
  leaves = _mosaic_tiles.split_payload(payloads, op, grid)

  def kernel(grid: _mosaic_tiles.Grid, *refs: Any) -> None:
    add_up, pieces = _load_workers(refs[:-1], op, grid, workers, like.dtype)
    _mosaic_tiles.evaluate(
      add_up, grid, _mosaic_tiles.give_position(grid), *pieces, values=refs[-1]
    )

  total = jax.ShapeDtypeStruct(grid.layout[:3], jnp.float32)
  (found,) = _mosaic_tiles.call_tiles(
    kernel, f"sum_{_passes.op_name(op)}", grid, leaves, [total]
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
  workers = _passes.count_workers(payloads)
  _passes.check_mean(workers, like)
  live = _WORK + _count_sum(op, like, workers) + _count_rows(op)
  grid = _mosaic_tiles.make_grid(
    op, like, live=live, reduces=True, interpret=interpret
  )
  leaves = _mosaic_tiles.split_payload(payloads, op, grid)

  def kernel(grid: _mosaic_tiles.Grid, seed_ref: Any, *refs: Any) -> None:
    coded, payload_refs = refs[: len(leaves)], refs[len(leaves) :]
    add_up, pieces = _load_workers(coded, op, grid, workers, like.dtype)

    def encode_sum(position: Array, seed: Array, *pieces: Array) -> Any:
      mean = add_up(position, *pieces) * jnp.float32(1 / workers)
      return _encode_with(op, grid)(mean, position, seed)

    place = (
      _mosaic_tiles.give_position(grid),
      _mosaic_tiles.give_scalar(seed_ref),
    )
    encoded = _mosaic_tiles.evaluate(encode_sum, grid, *place, *pieces)
    _mosaic_tiles.store_payload(payload_refs, op, grid, encoded)

  found = _mosaic_tiles.call_tiles(
    kernel,
    f"encode_mean_{_passes.op_name(op)}",
    grid,
    [_seed_input(op, key), *leaves],
    _mosaic_tiles.payload_shapes(op, grid),
  )
  return _mosaic_tiles.join_payload(found, grid)


def _encode_with(
  op: _block_op.BlockOp, grid: _mosaic_tiles.Grid
) -> Callable[..., Any]:
  """Returns a function from values, positions and a seed to a payload."""

  def encode_tile(values: Array, position: Array, seed: Array) -> Any:
    tile = _mosaic_tiles.make_tile(grid, position)
    return op.encode_tile(values, tile, seed if op.needs_key else None)

  return encode_tile


def _load_workers(
  refs: Sequence[Any],
  op: _block_op.BlockOp,
  grid: _mosaic_tiles.Grid,
  workers: int,
  dtype: Any,
) -> tuple[Callable[..., Array], list[_planes.Argument]]:
  """Returns a function that adds up payloads, and its arguments."""
  # Before them it takes positions. Payloads of many workers are added up here,
  # one after another, and the only argument is their sum.

  def decode_pieces(position: Array, *pieces: Array) -> Array:
    tile = _mosaic_tiles.make_tile(grid, position)
    return _passes.round_decoded(
      op.decode_tile(_mosaic_tiles.join_leaves(op, pieces), tile), dtype
    )

  def decode_worker(worker: Any) -> list[Array]:
    pieces = _mosaic_tiles.load_payload(refs, op, grid, worker)
    return _mosaic_tiles.evaluate(
      decode_pieces, grid, _mosaic_tiles.give_position(grid), *pieces
    )[0]

  if workers > _error_memory.MAX_UNROLL_IN_KERNEL:
    total = _error_memory.add_in_order(decode_worker, workers, 0)
    planes = [_planes.remember(lambda plane: plane, plane) for plane in total]
    return lambda position, total: total, [
      _mosaic_tiles.give_values(planes, grid)
    ]
  pieces = [
    _mosaic_tiles.load_payload(refs, op, grid, w) for w in range(workers)
  ]
  count = len(pieces[0])

  def add_up(position: Array, *pieces: Array) -> Array:
    term = lambda w: decode_pieces(
      position, *pieces[w * count : (w + 1) * count]
    )
    return _error_memory.add_in_order(term, workers, workers)

  return add_up, [piece for each in pieces for piece in each]


def _count_rows(op: _block_op.BlockOp) -> int:
  """Returns the number of rows of words that a payload has."""
  return sum(
    rows
    for leaf in op.leaf_layouts()
    if leaf.per_element
    for _, rows in leaf.pieces
  )


def _count_sum(op: _block_op.BlockOp, like: ShapedLike, workers: int) -> int:
  """Returns the number of arrays of a plane that a sum of payloads takes."""
  if workers > _error_memory.MAX_UNROLL_IN_KERNEL:
    return op.planes + _count_rows(op)
  return workers * _count_rows(op)


def _split_planes(x: Array, grid: _mosaic_tiles.Grid) -> Array:
  return x.reshape(grid.layout[:3])


def _seed_input(op: _block_op.BlockOp, key: core.Key | None) -> Array:
  """Returns the seed of random numbers, 0 for an op that draws none."""
  if not op.needs_key:
    return jnp.zeros(1, jnp.uint32)
  assert key is not None
  return key.worker.reshape(1)
