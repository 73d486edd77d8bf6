"""Passes over blocks as Triton kernels: a program makes some of the blocks.

A tile holds the same few blocks of every plane, and so all codes of its words:
values are read once and payloads are written once.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, Key, PyTree, ShapedLike
from jaxmotion.kernels._block_op import (
  BlockOp,
  Cut,
  Leaf,
  Tile,
  fill,
  refuse_padding,
)
from jaxmotion.kernels._error_memory import (
  UNROLL_IN_KERNEL,
  ErrorMemory,
  add_in_order,
  clear_error,
)
from jaxmotion.kernels._triton import (
  call_kernel,
  load,
  load_scalar,
  power_of_two,
  store,
  tile_index,
)

# Values of a tile: enough to hide latencies, few enough for registers.
_FEWEST, _MOST = 1 << 11, 1 << 15


class _Grid(NamedTuple):
  """Tiles of powers of two.

  Attributes:
    cut: the blocks of the array.
    shape: (planes, blocks, width) of a tile.
    payload: leaves of the payload, as ShapeDtypeStructs.
    tiles: how many there are.
    at: which of them this is, inside a kernel.
  """

  cut: Cut
  shape: tuple[int, int, int]
  payload: PyTree
  tiles: int
  at: Any = None

  @property
  def here(self) -> "_Grid":
    """The tile of the kernel that asks."""
    return self._replace(at=tile_index())


def encode(
  x: Array, key: Key | None, *, op: BlockOp, interpret: bool = False
) -> PyTree:
  """See `_api`."""
  grid = _grid(op, x)

  def kernel(*refs: Any) -> None:
    (x_ref, *seed), outputs = _split(refs, 1 + op.needs_key)
    here = grid.here
    tile = _tile(here)
    values = _load_values(x_ref, here, tile)
    _store_payload(
      outputs, op, here, op.encode_tile(values, tile, _first(seed))
    )

  inputs = [x, *_seed(op, key)]
  return _call(
    kernel,
    f"encode_{_name(op)}",
    grid,
    inputs,
    grid.payload,
    interpret=interpret,
  )


def encode_error(
  x: Array,
  memory: ErrorMemory,
  key: Key | None,
  *,
  op: BlockOp,
  decay: float,
  interpret: bool = False,
) -> tuple[PyTree, Array]:
  """See `_api`."""
  grid = _grid(op, x)
  # Padding repeats a value of another tile, which may be overwritten already.
  refuse_padding(grid.cut)
  sent = jax.tree.leaves(memory.sent)
  if not sent:
    raise NotImplementedError("the memory must hold a payload")

  def kernel(*refs: Any) -> None:
    inputs, (*outputs, v_ref) = _split(refs, 3 + len(sent) + op.needs_key)
    x_ref, value_ref, count_ref, *others = inputs
    here = grid.here
    tile = _tile(here)
    decoded = op.decode_tile(
      _load_payload(others[: len(sent)], op, here, 0), tile
    )
    error = clear_error(_load_values(value_ref, here, tile) - decoded)
    error = jnp.where(load_scalar(count_ref) > 0, error, 0.0)
    v = fill(_load_values(x_ref, here, tile) + error * decay, tile, 0.0)
    store(v_ref, tile.position, v, tile.inside)
    seed = _first(others[len(sent) :])
    _store_payload(outputs, op, here, op.encode_tile(v, tile, seed))

  count = memory.count.reshape(1)
  inputs = [x, memory.value, count, *sent, *_seed(op, key)]
  # A tile writes where it has read: the value and, of the last payload, itself.
  aliases = {1: len(sent), **{3 + i: i for i in range(len(sent))}}
  like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  return _call(
    kernel,
    f"encode_error_{_name(op)}",
    grid,
    inputs,
    (grid.payload, like),
    aliases=aliases,
    interpret=interpret,
  )


def sum_decoded(
  payloads: PyTree, *, op: BlockOp, like: ShapedLike, interpret: bool = False
) -> Array:
  """See `_api`."""
  grid = _grid(op, like)
  leaves = jax.tree.leaves(payloads)
  workers = leaves[0].shape[0]

  def kernel(*refs: Any) -> None:
    here = grid.here
    tile = _tile(here)
    total = _sum(refs[:-1], op, here, tile, workers, like.dtype)
    inside = tile.inside
    if grid.cut.is_padded:
      real = tile.position < grid.cut.size
      inside = real if inside is None else inside & real
    store(refs[-1], tile.position, total, inside)

  return _call(
    kernel,
    f"sum_{_name(op)}",
    grid,
    leaves,
    jax.ShapeDtypeStruct(like.shape, jnp.float32),
    interpret=interpret,
  )


def encode_mean(
  payloads: PyTree,
  key: Key | None,
  *,
  op: BlockOp,
  like: ShapedLike,
  interpret: bool = False,
) -> PyTree:
  """See `_api`."""
  grid = _grid(op, like)
  refuse_padding(grid.cut)
  leaves = jax.tree.leaves(payloads)
  workers = leaves[0].shape[0]
  if workers & (workers - 1) or like.dtype != jnp.float32:
    raise NotImplementedError(
      "the mean must be float32, of a power of two of workers, got "
      f"{jnp.dtype(like.dtype).name} of {workers}"
    )

  def kernel(*refs: Any) -> None:
    inputs, outputs = _split(refs, len(leaves) + op.needs_key)
    here = grid.here
    tile = _tile(here)
    coded, seed = inputs[: len(leaves)], inputs[len(leaves) :]
    total = _sum(coded, op, here, tile, workers, like.dtype)
    mean = fill(total * jnp.float32(1 / workers), tile, 0.0)
    _store_payload(outputs, op, here, op.encode_tile(mean, tile, _first(seed)))

  return _call(
    kernel,
    f"encode_mean_{_name(op)}",
    grid,
    [*leaves, *_seed(op, key)],
    grid.payload,
    interpret=interpret,
  )


def _call(
  kernel: Callable[..., None],
  name: str,
  grid: _Grid,
  inputs: Sequence[Array],
  outputs: PyTree,
  **options: Any,
) -> PyTree:
  tile_values = math.prod(grid.shape)
  return call_kernel(
    kernel, name, grid.tiles, tile_values, inputs, outputs, **options
  )


def _grid(op: BlockOp, like: ShapedLike) -> _Grid:
  if jnp.promote_types(like.dtype, jnp.float32) != jnp.float32:
    raise NotImplementedError(
      f"values must fit in float32, got {jnp.dtype(like.dtype).name}"
    )
  cut = op.cut(tuple(like.shape))
  planes, width = power_of_two(cut.planes), power_of_two(cut.width)
  if planes * width > _MOST:
    raise NotImplementedError(
      f"a block of all planes must be of at most {_MOST} values, got "
      f"{planes} x {width}"
    )
  group = max(1, _FEWEST // (planes * width))
  while group > 1 and cut.blocks % group:
    # Tiles of whole groups need no mask, which would narrow loads.
    group //= 2
  payload = jax.eval_shape(
    lambda x, seed: op.encode(x, Key(seed, seed)),
    jax.ShapeDtypeStruct(like.shape, like.dtype),
    jax.ShapeDtypeStruct((), jnp.uint32),
  )
  return _Grid(cut, (planes, group, width), payload, -(-cut.blocks // group))


def _tile(grid: _Grid) -> Tile:
  index, inside = _index(grid, 0, grid.cut.planes, True)
  return Tile(index.astype(jnp.uint32), inside, grid.cut.width)


def _index(
  grid: _Grid, first: int, rows: int, whole: bool
) -> tuple[Array, Array | None]:
  """Where a tile of some rows lies in a flat leaf, and what is inside."""
  _, blocks, width, _ = grid.cut
  _, group, most = grid.shape
  # Scales of two dimensions: with a third of length one, every thread would
  # load one for each of its values.
  shape = (power_of_two(rows), group, *((most,) if whole else ()))
  row, block, *column = (
    lax.broadcasted_iota(jnp.int32, shape, d) for d in range(len(shape))
  )
  block = block + grid.at * group
  index = (row + first) * blocks + block
  limits = [(row, rows, shape[0]), (block, blocks, group)]
  if whole:
    index = index * width + column[0]
    limits.append((column[0], width, most))
  inside = None
  for place, limit, step in limits:
    if limit % step:
      within = place < limit
      inside = within if inside is None else inside & within
  return index, inside


def _load_values(ref: Any, grid: _Grid, tile: Tile) -> Array:
  index = tile.position.astype(jnp.int32)
  if grid.cut.is_padded:
    index = jnp.minimum(index, grid.cut.size - 1)
  return load(ref, index, tile.inside).astype(jnp.float32)


def _store_payload(
  refs: Sequence[Any],
  op: BlockOp,
  grid: _Grid,
  leaves: tuple[list[Array], ...],
) -> None:
  for ref, spec, pieces in zip(refs, op.leaves(), leaves, strict=True):
    for (first, rows), piece in zip(spec.pieces, pieces, strict=True):
      index, inside = _index(grid, first, rows, spec.whole)
      store(ref, index, piece.reshape(index.shape), inside)


def _load_payload(
  refs: Sequence[Any], op: BlockOp, grid: _Grid, worker: Any
) -> tuple[list[Array], ...]:
  def pieces(ref: Any, spec: Leaf) -> list[Array]:
    parts = []
    start = worker * _leaf_size(spec, grid)
    for first, rows in spec.pieces:
      index, inside = _index(grid, first, rows, spec.whole)
      part = load(ref, index + start, inside)
      parts.append(part if spec.whole else part[..., None])
    return parts

  return tuple(
    pieces(ref, spec) for ref, spec in zip(refs, op.leaves(), strict=True)
  )


def _leaf_size(spec: Leaf, grid: _Grid) -> int:
  rows = sum(n for _, n in spec.pieces)
  return rows * grid.cut.blocks * (grid.cut.width if spec.whole else 1)


def _sum(
  refs: Sequence[Any],
  op: BlockOp,
  grid: _Grid,
  tile: Tile,
  workers: int,
  dtype: Any,
) -> Array:
  def one(worker: Any) -> Array:
    y = op.decode_tile(_load_payload(refs, op, grid, worker), tile)
    return y.astype(dtype).astype(jnp.float32)

  return add_in_order(one, workers, UNROLL_IN_KERNEL)


def _split(refs: Sequence[Any], inputs: int) -> tuple[Sequence[Any], Any]:
  return refs[:inputs], refs[inputs:]


def _seed(op: BlockOp, key: Key | None) -> list[Array]:
  if not op.needs_key:
    return []
  assert key is not None
  return [key.worker.reshape(1)]


def _first(refs: Sequence[Any]) -> Array | None:
  return load_scalar(refs[0]) if refs else None


def _name(op: BlockOp) -> str:
  return type(op).__name__.removesuffix("Op").lower()
