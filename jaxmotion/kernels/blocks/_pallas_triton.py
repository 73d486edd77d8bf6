"""Block passes as Triton kernels: a program computes a few blocks per plane.

A tile holds the same few blocks of every plane, and so all codes of its words.
Each element is read once, and each word of the payload is written once. With
tiles of one plane, up to 32 programs would have to combine their codes into the
same word.

A kernel loads a tile, calls `op.decode_tile` or `op.encode_tile`, and stores
the pieces of the payload. Whatever differs between quantizers is in the op.
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
  """Division of an array's blocks into tiles of power-of-two dimensions."""

  layout: _block_op.BlockLayout
  shape: tuple[int, int, int]  # (planes, blocks, width) of a tile.
  payload: PyTree  # Leaves of the payload, as ShapeDtypeStructs.
  tiles: int
  start: Any = None  # First block of the tile that the running kernel computes.

  def at_program(self) -> "_Grid":
    """Returns the grid with the first block of the running program's tile."""
    start = lax.mul(_triton.tile_index(), np.int32(self.shape[1]))
    return self._replace(start=start)


def encode(x: Array, key: core.Key | None, *, op: _block_op.BlockOp) -> PyTree:
  """Encodes an array with one kernel that reads it once."""
  load_array = lambda decoded, count, x: x()
  seed = _list_seed(op, key)
  payload, _ = _run_pass(
    _passes.Pass("encode", op, x, load_array, arrays=[x], seed=seed)
  )
  return payload


def encode_error(
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

  return _run_pass(
    _passes.Pass(
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
  payloads: PyTree, *, op: _block_op.BlockOp, like: ShapedLike
) -> Array:
  """Decodes and adds payloads of several workers with one kernel."""
  leaves = jax.tree.leaves(payloads)
  _, total = _run_pass(
    _passes.Pass(
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
  payload, _ = _run_pass(
    _passes.Pass(
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


def _list_seed(op: _block_op.BlockOp, key: core.Key | None) -> list[Array]:
  if not op.needs_key:
    return []
  assert key is not None
  return [key.worker.reshape(1)]


def _run_pass(spec: _passes.Pass) -> tuple[PyTree, Any]:
  """Runs a pass with one kernel; returns the payload and values it writes."""
  op, grid = spec.op, _make_grid(spec.op, spec.like)
  if spec.needs_full_blocks:
    # Entries of padding repeat an element of another tile.
    _block_op.reject_padding(grid.layout)

  def kernel(*refs: Any) -> None:
    """Computes one tile: loads, combines and encodes its inputs, stores."""
    arrays, counts, payload, seed, outputs = spec.split_refs(refs)
    here = grid.at_program()
    tile = _make_tile(here)
    decode = lambda worker: op.decode_tile(
      _load_payload(payload, op, here, worker), tile
    )
    values = spec.combine(
      lambda: spec.add_workers(decode),
      lambda: _triton.load_scalar(counts[0]),
      *(functools.partial(_load_values, ref, here, tile) for ref in arrays),
    )
    if spec.needs_full_blocks:
      values = _block_op.fill_outside(values, tile, 0.0)
    if spec.writes_values:
      inside = _find_existing(here, tile)
      _triton.store(outputs[-1], tile.position, values, inside)
    if spec.writes_payload:
      drawn = _triton.load_scalar(seed[0]) if seed else None
      leaves = _trace_tile(
        values, tile.position, tile.inside, drawn, op=op, width=tile.width
      )
      _store_payload(outputs[: len(leaves)], op, here, leaves)

  like = jax.ShapeDtypeStruct(spec.like.shape, jnp.float32)
  return _triton.call_kernel(
    kernel,
    spec.kernel_name,
    grid.tiles,
    math.prod(grid.shape),
    [*spec.arrays, *spec.counts, *spec.payload, *spec.seed],
    (
      grid.payload if spec.writes_payload else (),
      like if spec.writes_values else None,
    ),
    aliases=spec.aliases,
  )


def _make_grid(op: _block_op.BlockOp, like: ShapedLike) -> _Grid:
  """Returns the tiles of an array, or raises NotImplementedError."""
  # A tile has all planes and whole blocks, because a scale needs its whole
  # block and a word all its planes. That bounds planes * width by what
  # registers hold.
  if jnp.promote_types(like.dtype, jnp.float32) != jnp.float32:
    raise NotImplementedError(
      f"values must fit in float32, got {jnp.dtype(like.dtype).name}"
    )
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
  """Encodes a tile by one trace, which arrays of many shapes share."""
  # Arrays of many shapes have tiles of few types, each of which is traced once.
  # From JAX 0.12 on, a tile is traced again for each grid, which is in the key
  # of JAX's cache.
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
  masks = [_triton.inside_limit(*limit) for limit in limits]
  return index, _triton.join_masks(*masks)


@core.trace_in_place
def _load_values(ref: Any, grid: _Grid, tile: _block_op.Tile) -> Array:
  index = tile.position.astype(jnp.int32)
  if grid.layout.is_padded:
    # Padding repeats the last element, as `to_blocks` does.
    index = jnp.minimum(index, grid.layout.size - 1)
  return _triton.load(ref, index, tile.inside).astype(jnp.float32)


def _find_existing(grid: _Grid, tile: _block_op.Tile) -> Array | None:
  """Returns which entries of a tile are elements, None if all are."""
  if not grid.layout.is_padded:
    return tile.inside
  return _triton.join_masks(tile.inside, tile.position < grid.layout.size)


@core.trace_in_place
def _store_payload(
  refs: Sequence[Any],
  op: _block_op.BlockOp,
  grid: _Grid,
  leaves: tuple[list[Array], ...],
) -> None:
  """Stores the pieces of a tile's payload where they belong."""
  for ref, leaf, pieces in zip(refs, op.leaf_layouts(), leaves, strict=True):
    for (first, rows), piece in zip(leaf.pieces, pieces, strict=True):
      index, inside = _leaf_index(grid, first, rows, leaf.per_element)
      _triton.store(ref, index, piece.reshape(index.shape), inside)


def _load_payload(
  refs: Sequence[Any], op: _block_op.BlockOp, grid: _Grid, worker: Any
) -> tuple[list[Array], ...]:
  """Loads a tile's pieces of one worker's payload."""

  def load_pieces(ref: Any, leaf: _block_op.LeafLayout) -> list[Array]:
    """Loads a tile's pieces of one leaf of the payload."""
    pieces = []
    start = worker * math.prod(grid.layout.leaf_shape(leaf))
    for first, rows in leaf.pieces:
      index, inside = _leaf_index(grid, first, rows, leaf.per_element)
      piece = _triton.load(ref, index + start, inside)
      pieces.append(piece if leaf.per_element else piece[..., None])
    return pieces

  return tuple(
    load_pieces(ref, leaf)
    for ref, leaf in zip(refs, op.leaf_layouts(), strict=True)
  )
