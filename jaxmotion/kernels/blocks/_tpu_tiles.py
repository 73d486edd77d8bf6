"""Tiles of the Pallas kernels for TPUs, and their parts of arrays and payloads.

The array is seen as [planes, rows, columns * width]. Where a block is a part of
a row, the rows are those of the array. A TPU stores arrays in tiles of
(8, 128), and another view of them would be a copy. A tile of the kernel is
[planes, group of rows, width] and has all codes of its words, as in
`_pallas_triton`.

Scales lie in the kernel as [groups, columns, planes, group], and XLA turns them
to [planes, blocks]. Without that turn a group would need 128 rows, and 128 rows
of 32 planes exceed a TPU's vector memory.

Pallas is imported inside functions, as in `_triton`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op, rotate
from jaxmotion.kernels.blocks import _passes

# Bytes of a tile of float32: enough to hide latencies, and few enough for the
# compiler, which unrolls all operations on a tile.
_TILE_BYTES = 1 << 18
# A pass holds about eight arrays of a tile, and vector memory is 16 MiB.
_MAX_TILE_BYTES = 1 << 20
# A TPU's own tile is 128 lanes of 8 rows of 32 bits, or of 16 rows of 16 bits.
_ROW_BYTES = 32
_LANES = 128


class Grid(NamedTuple):
  """Division of an array's blocks into tiles.

  Attributes:
    layout: the blocks of the array.
    rows: rows of each plane.
    columns: blocks per row.
    group: rows per tile.
    payload: leaves of the payload, as ShapeDtypeStructs.
  """

  layout: _block_op.BlockLayout
  rows: int
  columns: int
  group: int
  payload: PyTree

  @property
  def groups(self) -> int:
    """Number of groups of rows; the last one may reach beyond the end."""
    return -(-self.rows // self.group)

  @property
  def view(self) -> tuple[int, int, int]:
    """The shape [planes, rows, elements] in which values are seen."""
    planes, _, width, _ = self.layout
    return planes, self.rows, self.columns * width


class Operand(NamedTuple):
  """An argument or a result of a kernel, and the part that a tile has of it.

  Attributes:
    array: the array in the kernel's view; of a result, its shape and dtype.
    block: shape of a tile's part; None for a scalar.
    place: (group, column) -> index of that part, in units of `block`.
    stacked: whether the array has a leading axis of workers.
  """

  array: Any
  block: tuple[int | None, ...] | None = None
  place: Callable[..., tuple[Any, ...]] | None = None
  stacked: bool = False


def make_grid(
  op: _block_op.BlockOp, like: ShapedLike, *, by_rows: bool
) -> Grid:
  """Returns the tiles of an array, or raises NotImplementedError."""
  _passes.check_values(like)
  if isinstance(op, rotate.RotateOp):
    raise NotImplementedError("a TPU's kernels cannot add neighbors in a row")
  layout = op.layout(tuple(like.shape))
  _block_op.reject_padding(layout)
  planes, blocks, width, _ = layout
  if width % _LANES:
    raise NotImplementedError(
      f"blocks must have a multiple of {_LANES} values, got {width}"
    )
  least = _ROW_BYTES // jnp.dtype(like.dtype).itemsize
  bytes_of_row = 4 * planes * width
  if least * bytes_of_row > _MAX_TILE_BYTES:
    raise NotImplementedError(
      f"{least} blocks of all planes must have at most {_MAX_TILE_BYTES} bytes "
      f"in float32, got {least * bytes_of_row}"
    )
  group = max(least, _TILE_BYTES // bytes_of_row // least * least)
  columns, rest = divmod(like.shape[-1], width)
  if not by_rows or rest or blocks % columns:
    columns = 1
  payload = _block_op.describe_payload(op, like)
  rows = blocks // columns
  return Grid(layout, rows, columns, min(group, rows), payload)


def make_tile(grid: Grid) -> _block_op.Tile:
  """Returns the tile that the running kernel computes."""
  planes, blocks, width, _ = grid.layout
  shape = planes, grid.group, width
  plane, row, element = (
    lax.broadcasted_iota(jnp.int32, shape, d) for d in range(3)
  )
  row = row + program_id(0) * grid.group
  block = plane * blocks + row * grid.columns + program_id(1)
  position = (block * width + element).astype(jnp.uint32)
  return _block_op.Tile(position, None, width)


def values_operand(x: ShapedLike, grid: Grid) -> Operand:
  """Returns the operand of an array, or of a result of this shape."""
  planes, _, elements = grid.view
  block = planes, grid.group, elements // grid.columns
  view = _apply(lambda a: a.reshape(grid.view), x)
  return Operand(view, block, lambda i, j: (0, i, j))


def payload_operands(
  payload: PyTree,
  op: _block_op.BlockOp,
  grid: Grid,
  *,
  stacked: bool = False,
) -> list[Operand]:
  """Returns the operands of a payload, or of payloads of several workers."""

  def make_operand(leaf: _block_op.LeafLayout, a: ShapedLike) -> Operand:
    workers = a.shape[:1] if stacked else ()
    rows = _count_rows(leaf)
    if leaf.per_element:
      # All columns are one part, since a part of some would be no whole tile of
      # the TPU's. It stays in vector memory while the columns come in turn.
      columns = (grid.columns,) if grid.columns > 1 else ()
      shape = grid.rows, *columns, grid.layout.width
      view = _apply(lambda a: a.reshape(*workers, rows, *shape), a)
      block = rows, grid.group, *shape[1:]
      rest = (0,) * (len(block) - 2)
      return Operand(view, block, lambda i, j: (0, i, *rest), stacked)
    by_row = *workers, rows, -1
    view = _apply(lambda a: _split_groups(a.reshape(by_row), grid), a)
    block = None, None, rows, grid.group
    return Operand(view, block, lambda i, j: (i, j, 0, 0), stacked)

  leaves = jax.tree.leaves(payload)
  return list(map(make_operand, op.leaf_layouts(), leaves))


def join_payload(
  found: Sequence[Array], op: _block_op.BlockOp, grid: Grid
) -> PyTree:
  """Returns the payload that a kernel wrote."""
  leaves = [
    (a if leaf.per_element else _join_groups(a, grid)).reshape(like.shape)
    for a, leaf, like in zip(
      found, op.leaf_layouts(), jax.tree.leaves(grid.payload), strict=True
    )
  ]
  return jax.tree.unflatten(jax.tree.structure(grid.payload), leaves)


def store_payload(
  refs: Sequence[Any],
  op: _block_op.BlockOp,
  grid: Grid,
  leaves: tuple[list[Array], ...],
) -> None:
  """Stores the pieces of a tile."""
  for ref, leaf, pieces in zip(refs, op.leaf_layouts(), leaves, strict=True):
    for (first, rows), piece in zip(leaf.pieces, pieces, strict=True):
      if leaf.per_element:
        ref[first : first + rows, :, *_column(grid)] = piece
      else:
        ref[first : first + rows] = _widen(piece)[..., 0].astype(ref.dtype)


def load_payload(
  refs: Sequence[Any], op: _block_op.BlockOp, grid: Grid
) -> tuple[list[Array], ...]:
  """Loads the pieces of a tile."""

  def load_piece(
    ref: Any, leaf: _block_op.LeafLayout, first: int, rows: int
  ) -> Array:
    if leaf.per_element:
      return ref[first : first + rows, :, *_column(grid)]
    return _widen(ref[first : first + rows])[..., None]

  return tuple(
    [load_piece(ref, leaf, *piece) for piece in leaf.pieces]
    for ref, leaf in zip(refs, op.leaf_layouts(), strict=True)
  )


def call_tiles(
  kernel: Callable[..., None],
  name: str,
  grid: Grid,
  inputs: Sequence[Operand],
  outputs: Sequence[Operand],
  *,
  workers: int | None = None,
  has_total: bool = False,
  aliases: dict[int, int] | None = None,
  interpret: bool = False,
) -> list[Array]:
  """Runs a kernel once for every tile, and for every worker in turn."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import tpu as pltpu

  def make_spec(operand: Operand) -> Any:
    if operand.block is None:
      return pl.BlockSpec(memory_space=pltpu.SMEM)
    place = operand.place
    assert place is not None
    if operand.stacked:
      at_worker = lambda i, j, worker: (worker, *place(i, j))
      return pl.BlockSpec((None, *operand.block), at_worker)
    return pl.BlockSpec(operand.block, lambda i, j, *_: place(i, j))

  planes, _, width, _ = grid.layout
  total = pltpu.VMEM((planes, grid.group, width), jnp.float32)
  arrays = [operand.array for operand in inputs]
  tiles = grid.groups, grid.columns
  return pl.pallas_call(
    kernel,
    grid=tiles if workers is None else (*tiles, workers),
    in_specs=[make_spec(operand) for operand in inputs],
    out_specs=[make_spec(operand) for operand in outputs],
    out_shape=[
      core.shape_varying_like(y.array.shape, y.array.dtype, arrays)
      for y in outputs
    ],
    scratch_shapes=[total] if has_total else [],
    input_output_aliases=aliases or {},
    interpret=interpret,
    name=name,
  )(*arrays)


def program_id(axis: int) -> Array:
  """Returns the place of the running kernel along an axis of its grid."""
  from jax.experimental import pallas as pl

  return pl.program_id(axis)


def run_if(condition: Array) -> Callable[[Callable[[], None]], None]:
  """Returns a decorator that runs a function where a condition holds."""
  from jax.experimental import pallas as pl

  return pl.when(condition)


def _apply(fn: Callable[[Array], Array], a: ShapedLike) -> Any:
  """Returns fn(a), or its shape if `a` is only a shape."""
  if isinstance(a, jax.ShapeDtypeStruct):
    return jax.eval_shape(fn, a)
  return fn(a)


def _split_groups(a: Array, grid: Grid) -> Array:
  """Turns [..., rows, blocks] to [..., groups, columns, rows, group]."""
  a = a.reshape(*a.shape[:-1], grid.rows, grid.columns)
  extra = grid.groups * grid.group - grid.rows
  a = jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, extra), (0, 0)])
  a = a.reshape(*a.shape[:-2], grid.groups, grid.group, grid.columns)
  return jnp.moveaxis(a, (-3, -1, -4, -2), (-4, -3, -2, -1))


def _join_groups(a: Array, grid: Grid) -> Array:
  """Inverts `_split_groups` of one payload."""
  a = jnp.moveaxis(a, (-4, -3, -2, -1), (-3, -1, -4, -2))
  rows = a.reshape(a.shape[0], -1, grid.columns)[:, : grid.rows]
  return rows.reshape(a.shape[0], -1)


def _column(grid: Grid) -> tuple[Array, ...]:
  """Returns the index of the tile's column in a part of all columns."""
  return (program_id(1),) if grid.columns > 1 else ()


def _widen(scale: Array) -> Array:
  """Returns integers of 32 bits: a TPU turns no others from rows to columns."""
  integer = jnp.issubdtype(scale.dtype, jnp.integer)
  return scale.astype(jnp.int32) if integer else scale


def _count_rows(leaf: _block_op.LeafLayout) -> int:
  return sum(count for _, count in leaf.pieces)
