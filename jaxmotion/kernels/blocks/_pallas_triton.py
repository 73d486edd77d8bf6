"""Block passes as Triton kernels: a program computes a few blocks per plane.

A tile holds the same few blocks of every plane, and so all codes of its words.
Each element is read once, and each word of the payload is written once. With
tiles of one plane, up to 32 programs would have to combine their codes into the
same word.

The kernels share three steps: load a tile, call `op.encode_tile` or
`op.decode_tile`, store the pieces of the payload. Whatever differs between
quantizers is in the op.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op, _error_memory, _triton
from jaxmotion.kernels.blocks import _passes

# Elements per tile: enough to hide latencies, few enough for registers.
_MIN_ELEMENTS, _MAX_ELEMENTS = 1 << 11, 1 << 15


class _Grid(NamedTuple):
  """Division of an array's blocks into tiles of power-of-two dimensions.

  Attributes:
    layout: the blocks of the array.
    shape: (planes, blocks, width) of a tile.
    payload: leaves of the payload, as ShapeDtypeStructs.
    tiles: number of tiles.
    start: first block of the tile that the running kernel computes.
  """

  layout: _block_op.BlockLayout
  shape: tuple[int, int, int]
  payload: PyTree
  tiles: int
  start: Any = None

  def at_program(self) -> "_Grid":
    """Returns the grid with the first block of the running program's tile."""
    start = lax.mul(_triton.tile_index(), np.int32(self.shape[1]))
    return self._replace(start=start)


def encode(
  x: Array,
  key: core.Key | None,
  *,
  op: _block_op.BlockOp,
  interpret: bool = False,
) -> PyTree:
  """Encodes an array with one kernel that reads it once."""
  grid = _make_grid(op, x)

  def kernel(*refs: Any) -> None:
    (x_ref, *seed), outputs = _split_refs(refs, 1 + op.needs_key)
    here = grid.at_program()
    tile = _make_tile(here)
    values = _load_values(x_ref, here, tile)
    leaves = _encode_tile(op, values, tile, _load_seed(seed))
    _store_payload(outputs, op, here, leaves)

  inputs = [x, *_seed_inputs(op, key)]
  return _call_tiles(
    kernel,
    f"encode_{_passes.op_name(op)}",
    grid,
    inputs,
    grid.payload,
    interpret=interpret,
  )


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
  # padding, whose entries repeat an element of another tile.
  grid = _make_grid(op, x)
  _block_op.reject_padding(grid.layout)
  sent = jax.tree.leaves(memory.sent)
  if not sent:
    raise NotImplementedError("the memory must hold a payload")

  def kernel(*refs: Any) -> None:
    inputs, (*outputs, v_ref) = _split_refs(refs, 3 + len(sent) + op.needs_key)
    x_ref, value_ref, count_ref, *others = inputs
    here = grid.at_program()
    tile = _make_tile(here)
    decoded = op.decode_tile(
      _load_payload(others[: len(sent)], op, here, 0), tile
    )
    error = _error_memory.clear_error(
      _load_values(value_ref, here, tile) - decoded
    )
    error = jnp.where(_triton.load_scalar(count_ref) > 0, error, 0.0)
    v = _load_values(x_ref, here, tile) + error * decay
    v = _block_op.fill_outside(v, tile, 0.0)
    _triton.store(v_ref, tile.position, v, tile.inside)
    seed = _load_seed(others[len(sent) :])
    _store_payload(outputs, op, here, _encode_tile(op, v, tile, seed))

  count = memory.count.reshape(1)
  inputs = [x, memory.value, count, *sent, *_seed_inputs(op, key)]
  aliases = {1: len(sent), **{3 + i: i for i in range(len(sent))}}
  like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  return _call_tiles(
    kernel,
    f"encode_error_{_passes.op_name(op)}",
    grid,
    inputs,
    (grid.payload, like),
    aliases=aliases,
    interpret=interpret,
  )


def sum_decoded(
  payloads: PyTree,
  *,
  op: _block_op.BlockOp,
  like: ShapedLike,
  interpret: bool = False,
) -> Array:
  """Decodes and adds payloads of several workers with one kernel."""
  grid = _make_grid(op, like)
  leaves = jax.tree.leaves(payloads)
  workers = _passes.count_workers(payloads)

  def kernel(*refs: Any) -> None:
    here = grid.at_program()
    tile = _make_tile(here)
    total = _sum_workers(refs[:-1], op, here, tile, workers, like.dtype)
    inside = tile.inside
    if grid.layout.is_padded:
      real = tile.position < grid.layout.size
      inside = real if inside is None else inside & real
    _triton.store(refs[-1], tile.position, total, inside)

  return _call_tiles(
    kernel,
    f"sum_{_passes.op_name(op)}",
    grid,
    leaves,
    jax.ShapeDtypeStruct(like.shape, jnp.float32),
    interpret=interpret,
  )


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
  grid = _make_grid(op, like)
  _block_op.reject_padding(grid.layout)
  leaves = jax.tree.leaves(payloads)
  workers = _passes.count_workers(payloads)
  _passes.check_mean(workers, like)

  def kernel(*refs: Any) -> None:
    inputs, outputs = _split_refs(refs, len(leaves) + op.needs_key)
    here = grid.at_program()
    tile = _make_tile(here)
    coded, seed = inputs[: len(leaves)], inputs[len(leaves) :]
    total = _sum_workers(coded, op, here, tile, workers, like.dtype)
    mean = _block_op.fill_outside(total * jnp.float32(1 / workers), tile, 0.0)
    encoded = _encode_tile(op, mean, tile, _load_seed(seed))
    _store_payload(outputs, op, here, encoded)

  return _call_tiles(
    kernel,
    f"encode_mean_{_passes.op_name(op)}",
    grid,
    [*leaves, *_seed_inputs(op, key)],
    grid.payload,
    interpret=interpret,
  )


def _call_tiles(
  kernel: Callable[..., None],
  name: str,
  grid: _Grid,
  inputs: Sequence[Array],
  outputs: PyTree,
  **options: Any,
) -> PyTree:
  elements = math.prod(grid.shape)
  return _triton.call_kernel(
    kernel, name, grid.tiles, elements, inputs, outputs, **options
  )


def _make_grid(op: _block_op.BlockOp, like: ShapedLike) -> _Grid:
  """Returns the tiles of an array, or raises NotImplementedError."""
  # A tile has all planes and whole blocks, because a scale needs its whole
  # block and a word all its planes. That bounds planes * width by what
  # registers hold.
  _passes.check_values(like)
  layout = op.layout(tuple(like.shape))
  planes, width = (
    _triton.power_of_two(layout.planes),
    _triton.power_of_two(layout.width),
  )
  if planes * width > _MAX_ELEMENTS:
    raise NotImplementedError(
      f"a block of all planes must be of at most {_MAX_ELEMENTS} values, got "
      f"{planes} x {width}"
    )
  group = max(1, _MIN_ELEMENTS // (planes * width))
  while group > 1 and layout.blocks % group:
    # A group that divides the blocks needs no mask, which would narrow loads.
    group //= 2
  payload = _block_op.describe_payload(op, like)
  tiles = -(-layout.blocks // group)
  return _Grid(layout, (planes, group, width), payload, tiles)


def _encode_tile(
  op: _block_op.BlockOp,
  values: Array,
  tile: _block_op.Tile,
  seed: Array | None,
) -> tuple[list[Array], ...]:
  """Encodes a tile by the op's own method, traced once for a type of tile."""
  # Arrays of many shapes have tiles of few types. From JAX 0.12 on, a tile is
  # traced again for each grid, which is in the key of JAX's cache.
  position, inside, width = tile
  return _trace_tile(values, position, inside, seed, op=op, width=width)


@functools.partial(jax.jit, static_argnames=("op", "width"))
@core.trace_in_place
def _trace_tile(
  values: Array,
  position: Array,
  inside: Array | None,
  seed: Array | None,
  *,
  op: _block_op.BlockOp,
  width: int,
) -> tuple[list[Array], ...]:
  return op.encode_tile(values, _block_op.Tile(position, inside, width), seed)


@core.trace_in_place
def _make_tile(grid: _Grid) -> _block_op.Tile:
  index, inside = _leaf_index(grid, 0, grid.layout.planes, True)
  return _block_op.Tile(index.astype(jnp.uint32), inside, grid.layout.width)


def _leaf_index(
  grid: _Grid, first: int, rows: int, per_element: bool
) -> tuple[Array, Array | None]:
  """Returns the flat indices of a tile's rows in a leaf, and their mask."""
  # Returns int32 indices of power-of-two shape, and which are inside, None if
  # all are.
  _, blocks, width, _ = grid.layout
  _, group, tile_width = grid.shape
  # Scales have two dimensions: with a third one of length one, every thread
  # would load a scale for each of its elements.
  shape = (
    _triton.power_of_two(rows),
    group,
    *((tile_width,) if per_element else ()),
  )
  row, block, *column = (
    lax.broadcasted_iota(jnp.int32, shape, d) for d in range(len(shape))
  )
  block = block + grid.start
  index = block if rows == 1 else row * blocks + block
  index = index + first * blocks if first else index
  limits = [(row, rows, shape[0]), (block, blocks, group)]
  if per_element:
    index = index * width + column[0]
    limits.append((column[0], width, tile_width))
  inside = None
  for place, limit, step in limits:
    if limit % step:
      within = place < limit
      inside = within if inside is None else inside & within
  return index, inside


@core.trace_in_place
def _load_values(ref: Any, grid: _Grid, tile: _block_op.Tile) -> Array:
  index = tile.position.astype(jnp.int32)
  if grid.layout.is_padded:
    # Padding repeats the last element, as `to_blocks` does.
    index = jnp.minimum(index, grid.layout.size - 1)
  return _triton.load(ref, index, tile.inside).astype(jnp.float32)


@core.trace_in_place
def _store_payload(
  refs: Sequence[Any],
  op: _block_op.BlockOp,
  grid: _Grid,
  leaves: tuple[list[Array], ...],
) -> None:
  for ref, leaf, pieces in zip(refs, op.leaf_layouts(), leaves, strict=True):
    for (first, rows), piece in zip(leaf.pieces, pieces, strict=True):
      index, inside = _leaf_index(grid, first, rows, leaf.per_element)
      _triton.store(ref, index, piece.reshape(index.shape), inside)


def _load_payload(
  refs: Sequence[Any], op: _block_op.BlockOp, grid: _Grid, worker: Any
) -> tuple[list[Array], ...]:
  """Loads a tile's pieces of one worker's payload."""

  def load_pieces(ref: Any, leaf: _block_op.LeafLayout) -> list[Array]:
    pieces = []
    start = worker * _leaf_size(leaf, grid)
    for first, rows in leaf.pieces:
      index, inside = _leaf_index(grid, first, rows, leaf.per_element)
      piece = _triton.load(ref, index + start, inside)
      pieces.append(piece if leaf.per_element else piece[..., None])
    return pieces

  return tuple(
    load_pieces(ref, leaf)
    for ref, leaf in zip(refs, op.leaf_layouts(), strict=True)
  )


def _leaf_size(leaf: _block_op.LeafLayout, grid: _Grid) -> int:
  rows = sum(n for _, n in leaf.pieces)
  width = grid.layout.width if leaf.per_element else 1
  return rows * grid.layout.blocks * width


def _sum_workers(
  refs: Sequence[Any],
  op: _block_op.BlockOp,
  grid: _Grid,
  tile: _block_op.Tile,
  workers: int,
  dtype: Any,
) -> Array:
  def decode_worker(worker: Any) -> Array:
    y = op.decode_tile(_load_payload(refs, op, grid, worker), tile)
    return _passes.round_decoded(y, dtype)

  return _error_memory.add_in_order(
    decode_worker, workers, _error_memory.MAX_UNROLL_IN_KERNEL
  )


def _split_refs(refs: Sequence[Any], inputs: int) -> tuple[Sequence[Any], Any]:
  return refs[:inputs], refs[inputs:]


def _seed_inputs(op: _block_op.BlockOp, key: core.Key | None) -> list[Array]:
  if not op.needs_key:
    return []
  assert key is not None
  return [key.worker.reshape(1)]


def _load_seed(refs: Sequence[Any]) -> Array | None:
  return _triton.load_scalar(refs[0]) if refs else None
