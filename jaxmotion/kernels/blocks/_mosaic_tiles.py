"""Tiles of the Mosaic GPU kernels, and their parts of arrays and payloads.

A tile is a few blocks of every plane, as in `_pallas_triton`. Each plane of it
is an array of its own (`_planes`), spread over the 128 threads of a warpgroup.
A thread has 4 neighbors of a block at a time, hence accesses of 16 bytes.

Pallas is imported inside functions, as in `_triton`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op
from jaxmotion.kernels.blocks import _passes, _planes

_VECTOR, _LANES, _WARPS = 4, 32, 4
_THREADS = _LANES * _WARPS
# Values per thread. A thread has 255 registers; addresses and what the compiler
# loads ahead take the rest.
_MAX_PER_THREAD = 152
# Indices are 32 bits.
_MAX_ELEMENTS = 2**31 - 2**16


class Grid(NamedTuple):
  """Division of an array's blocks into tiles.

  Attributes:
    layout: the blocks of the array.
    group: blocks of each plane per tile.
    span: neighbors of a block that the threads have at a time.
    payload: leaves of the payload, as ShapeDtypeStructs.
    interpret: whether the kernel runs as `jax.numpy`, which has no threads.
    first: number of the first block of each plane in the running kernel's tile.
  """

  layout: _block_op.BlockLayout
  group: int
  span: int
  payload: PyTree
  interpret: bool
  first: Any = None

  @property
  def tiles(self) -> int:
    """Number of tiles; the last two may overlap."""
    return -(-self.layout.blocks // self.group)

  @property
  def tile_shape(self) -> tuple[int, int, int]:
    """The shape of a tile: planes, blocks, width."""
    return self.layout.planes, self.group, self.layout.width

  def at_program(self, index: Array) -> "Grid":
    """Returns the grid with the place of a program's tile."""
    first = index * self.group
    if self.layout.blocks % self.group:
      first = jnp.minimum(first, self.layout.blocks - self.group)
    return self._replace(first=first)

  def rows(self) -> Any:
    """Returns the index of the running kernel's blocks."""
    from jax.experimental import pallas as pl

    return pl.ds(self.first, self.group)

  def cast(self, a: Array) -> Array:
    """Spreads an array of [blocks, width] or [blocks] over the threads."""
    if self.interpret:
      return a
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = _spread(self.span)
    return plgpu.layout_cast(a, layout if a.ndim == 2 else layout.reduce(1))

  def widen(self, a: Array) -> Array:
    """Repeats the elements of [blocks] to [blocks, width]."""
    return self.cast(lax.broadcast_in_dim(a, self.tile_shape[1:], (0,)))


@functools.cache
def _spread(span: int) -> Any:
  """Returns the layout of [blocks, width] on the threads of a warpgroup."""
  from jax.experimental.mosaic.gpu import TiledLayout
  from jax.experimental.pallas import mosaic_gpu as plgpu

  lanes = min(span // _VECTOR, _LANES)
  warps = span // _VECTOR // lanes
  rows = _LANES // lanes
  by_warp = rows, lanes * _VECTOR
  tiling = plgpu.Tiling(((_WARPS // warps * rows, span), by_warp, (1, _VECTOR)))
  # After tiling: warps by rows and columns, lanes by rows and columns, 1, 4.
  layout = TiledLayout(
    tiling, (-6, -5), (-4, -3), -1, _check_canonical=False
  ).canonicalize()
  return plgpu.Layout.TILED(
    layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
  )


def make_grid(
  op: _block_op.BlockOp,
  like: ShapedLike,
  *,
  live: int,
  reduces: bool,
  interpret: bool,
) -> Grid:
  """Returns the tiles of an array, or raises NotImplementedError."""
  _passes.check_values(like)
  layout = op.layout(tuple(like.shape))
  _block_op.reject_padding(layout)
  planes, blocks, width, size = layout
  if size > _MAX_ELEMENTS:
    raise NotImplementedError(
      f"arrays must have at most {_MAX_ELEMENTS} values, got {size}"
    )
  widest = width & -width
  if widest < _VECTOR:
    raise NotImplementedError(
      f"blocks must have a multiple of {_VECTOR} values, got {width}"
    )
  # A warp reduces a block alone if registers allow it; else warps share blocks.
  # The compiler stores no array of a single scale, hence two blocks at least.
  most = _THREADS * _VECTOR // (2 if reduces else 1)
  span = min(widest, _LANES * _VECTOR)
  # All scales are stored at the end.
  scales = planes if reduces else 0
  count = lambda span: live * (width // span) * _VECTOR + scales
  while count(span) > _MAX_PER_THREAD and span < min(widest, most):
    span *= 2
  group = _THREADS * _VECTOR // span
  if count(span) > _MAX_PER_THREAD:
    raise NotImplementedError(
      f"blocks of {width} values do not fit into registers {live} times"
    )
  if blocks < group:
    raise NotImplementedError(
      f"a plane must have at least {group} blocks, got {blocks}"
    )
  return Grid(
    layout, group, span, _block_op.describe_payload(op, like), interpret
  )


def split_payload(
  payload: PyTree, op: _block_op.BlockOp, grid: Grid
) -> list[Array]:
  """Returns the leaves of a payload, or of payloads of workers, as blocks."""

  def split_leaf(
    leaf: _block_op.LeafLayout, a: Array, like: ShapedLike
  ) -> Array:
    workers = a.shape[: a.ndim - len(like.shape)]
    return a.reshape(*workers, *grid.layout.leaf_shape(leaf))

  leaves = jax.tree.leaves(payload), jax.tree.leaves(grid.payload)
  return list(map(split_leaf, op.leaf_layouts(), *leaves))


def payload_shapes(
  op: _block_op.BlockOp, grid: Grid
) -> list[jax.ShapeDtypeStruct]:
  """Returns shapes and dtypes of the leaves of a payload, as blocks."""
  leaves = zip(op.leaf_layouts(), jax.tree.leaves(grid.payload), strict=True)
  return [
    jax.ShapeDtypeStruct(grid.layout.leaf_shape(leaf), a.dtype)
    for leaf, a in leaves
  ]


def join_payload(found: Sequence[Array], grid: Grid) -> PyTree:
  """Returns the payload that a kernel wrote."""
  likes, treedef = jax.tree.flatten(grid.payload)
  leaves = [a.reshape(b.shape) for a, b in zip(found, likes, strict=True)]
  return jax.tree.unflatten(treedef, leaves)


def load_values(ref: Any, grid: Grid) -> _planes.Planes:
  """Loads a tile of an array as float32."""
  load = lambda p: _load(ref.at[p], grid).astype(jnp.float32)
  return [_planes.remember(load, p) for p in range(grid.layout.planes)]


def store_plane(ref: Any, grid: Grid, p: int, plane: Array) -> None:
  """Stores the tile's part of one plane of an array."""
  _store(ref.at[p], grid, plane)


def load_payload(
  refs: Sequence[Any], op: _block_op.BlockOp, grid: Grid, *worker: Any
) -> list[_planes.Argument]:
  """Returns a tile of a payload as arguments, one for each piece."""
  _, group, width = grid.tile_shape
  load = lambda ref, row: _load(ref.at[(*worker, row)], grid)
  pieces = []
  for ref, leaf in zip(refs, op.leaf_layouts(), strict=True):
    for first, rows in leaf.pieces:
      planes = [_planes.remember(load, ref, first + r) for r in range(rows)]
      shape = rows, group, width if leaf.per_element else 1
      pieces.append(
        _planes.Argument(planes, jax.ShapeDtypeStruct(shape, ref.dtype))
      )
  return pieces


def store_payload(
  refs: Sequence[Any],
  op: _block_op.BlockOp,
  grid: Grid,
  pieces: Sequence[Sequence[Array]],
) -> None:
  """Stores a tile of a payload."""
  places = (
    (ref, first + r)
    for ref, leaf in zip(refs, op.leaf_layouts(), strict=True)
    for first, rows in leaf.pieces
    for r in range(rows)
  )
  parts = (part for piece in pieces for part in piece)
  for (ref, row), part in zip(places, parts, strict=True):
    _store(ref.at[row], grid, part.astype(ref.dtype))


def join_leaves(
  op: _block_op.BlockOp, pieces: Sequence[Array]
) -> tuple[list[Array], ...]:
  """Returns the pieces of each leaf, from those of all leaves."""
  rest = iter(pieces)
  return tuple([next(rest) for _ in leaf.pieces] for leaf in op.leaf_layouts())


def evaluate(
  fn: Callable[..., PyTree],
  grid: Grid,
  *args: _planes.Argument,
  values: Any = None,
) -> list[list[Array]]:
  """Evaluates a function of tiles one plane at a time."""
  run = _planes.Evaluator(grid.tile_shape, grid.widen)
  if values is None:
    return run.evaluate(fn, *args)
  store = functools.partial(store_plane, values, grid)
  return run.evaluate(fn, *args, store=store)


def give_values(planes: _planes.Planes, grid: Grid) -> _planes.Argument:
  """Returns a tile of float32 as an argument."""
  return _planes.Argument(
    planes, jax.ShapeDtypeStruct(grid.tile_shape, jnp.float32)
  )


def give_scalar(ref: Any) -> _planes.Argument:
  """Returns an array's only element as an argument."""
  load = _planes.remember(lambda: ref[0])
  return _planes.Argument([load], jax.ShapeDtypeStruct((), ref.dtype))


def give_position(grid: Grid) -> _planes.Argument:
  """Returns indices in the flat array, uint32, as an argument."""
  _, blocks, width, _ = grid.layout
  shape = grid.tile_shape

  def count_first() -> Array:
    row, element = (
      grid.cast(lax.broadcasted_iota(jnp.int32, shape[1:], d)) for d in range(2)
    )
    block = row + jnp.broadcast_to(grid.first, shape[1:])
    return (block * width + element).astype(jnp.uint32)

  first = _planes.remember(count_first)
  step = blocks * width
  planes = [
    _planes.remember(lambda p: first() + jnp.uint32(p * step), p)
    for p in range(shape[0])
  ]
  return _planes.Argument(planes, jax.ShapeDtypeStruct(shape, jnp.uint32))


def make_tile(grid: Grid, position: Array) -> _block_op.Tile:
  """Returns the tile that the running kernel computes."""
  return _block_op.Tile(position, None, grid.layout.width)


def call_tiles(
  kernel: Callable[..., None],
  name: str,
  grid: Grid,
  inputs: Sequence[Array],
  outputs: Sequence[jax.ShapeDtypeStruct],
  *,
  aliases: dict[int, int] | None = None,
) -> list[Array]:
  """Runs a kernel once for every tile."""
  types = [core.shape_varying_like(a.shape, a.dtype, inputs) for a in outputs]
  run = _interpret_tiles if grid.interpret else _launch_tiles
  return run(kernel, name, grid, inputs, types, aliases or {})


def _interpret_tiles(
  kernel: Callable[..., None],
  name: str,
  grid: Grid,
  inputs: Sequence[Array],
  types: Sequence[Any],
  aliases: dict[int, int],
) -> list[Array]:
  from jax.experimental import pallas as pl

  return pl.pallas_call(
    lambda *refs: kernel(grid.at_program(pl.program_id(0)), *refs),
    grid=(grid.tiles,),
    in_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in inputs],
    out_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in types],
    out_shape=types,
    input_output_aliases=aliases,
    interpret=True,
    name=name,
  )(*inputs)


def _launch_tiles(
  kernel: Callable[..., None],
  name: str,
  grid: Grid,
  inputs: Sequence[Array],
  types: Sequence[Any],
  aliases: dict[int, int],
) -> list[Array]:
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import mosaic_gpu as plgpu

  shared = {o: jax.new_ref(inputs[i]) for i, o in aliases.items()}
  given = [
    shared[aliases[i]] if i in aliases else a for i, a in enumerate(inputs)
  ]
  new = [o for o in range(len(types)) if o not in shared]

  def body(*refs: Any) -> None:
    read, written = refs[: len(given)], refs[len(given) :]
    output = dict(zip(new, written, strict=True))
    output |= {o: read[i] for i, o in aliases.items()}
    here = grid.at_program(lax.axis_index("tile"))
    kernel(here, *read, *(output[o] for o in range(len(types))))

  # Barriers around stores would order them with loads of other threads. There
  # are none: a thread loads what it stores, and in a tile no one else does.
  found = pl.kernel(
    body,
    [types[o] for o in new],
    mesh=plgpu.Mesh(grid=(grid.tiles,), grid_names=("tile",)),
    compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    name=name,
  )(*given)
  result = dict(zip(new, found, strict=True))
  result |= {o: jax.freeze(ref) for o, ref in shared.items()}
  return [result[o] for o in range(len(types))]


def _load(ref: Any, grid: Grid) -> Array:
  """Loads the tile's part of one plane: [blocks, width] or [blocks]."""
  if grid.interpret:
    return ref[grid.rows()]
  from jax.experimental.pallas import mosaic_gpu as plgpu

  layout = _spread(grid.span)
  if len(ref.shape) == 1:
    layout = layout.reduce(1)
  options = {"layout": layout, "optimized": False}
  if jax.__version_info__ < (0, 11):
    return plgpu.load(ref, grid.rows(), **options)
  return plgpu.load(ref.at[grid.rows()], **options)


def _store(ref: Any, grid: Grid, part: Array) -> None:
  """Stores the tile's part of one plane."""
  if grid.interpret or jax.__version_info__ < (0, 11):
    ref[grid.rows()] = part
    return
  from jax.experimental.pallas import mosaic_gpu

  plgpu: Any = mosaic_gpu  # Which has no `store` before JAX 0.11.
  plgpu.store(ref.at[grid.rows()], part, optimized=False)
