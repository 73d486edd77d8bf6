"""Block passes as Mosaic GPU kernels, for NVIDIA GPUs from Hopper on.

They are for the day on which Pallas lowers nothing to Triton any more. None has
run on a GPU, so nothing chooses them by itself.

A tile is a few blocks of every plane, as in `_pallas_triton`. Mosaic GPU has no
layout for arrays with an axis of length 1, and an expression on a tile [planes,
blocks, width] has many. Scales are [planes, blocks, 1], numbers of planes are
[planes, 1, 1], and words are [1, blocks, width]. Such an expression is traced
here. Each of its operations is applied to every plane alone, on an array of
[blocks, width], of [blocks], or of no axis. A plane is spread over the 128
threads of a warpgroup. A thread has 4 neighbors of a block at a time, hence
accesses of 16 bytes.

All operations on one plane come before those on the next, so that registers
hold one plane and not all of them. Numbers that are known while the kernel is
traced, such as shifts that depend on the plane only, stay numbers. They take no
instruction of the kernel.

Pallas is imported inside functions, as in `_triton`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike
from jaxmotion.kernels import _block_op, _dispatch, _error_memory
from jaxmotion.kernels.blocks import _passes

_VECTOR, _LANES, _WARPS = 4, 32, 4
_THREADS = _LANES * _WARPS
# Values per thread. A thread has 255 registers; addresses and what the compiler
# loads ahead take the rest.
_MAX_PER_THREAD = 152
# Arrays of one plane that encoding or decoding takes, beside its words, and
# that the update of an error memory takes more.
_WORK, _UPDATE = 3, 4
# Indices are 32 bits.
_MAX_ELEMENTS = 2**31 - 2**16
_REDUCTIONS: dict[str, tuple[Callable[..., Array], Callable[..., Array]]] = {
  "reduce_max": (jnp.max, jnp.maximum),
  "reduce_min": (jnp.min, jnp.minimum),
  "reduce_sum": (jnp.sum, jnp.add),
}
# Bits of the exponent of a float32, all of which are 1 in infinity and NaN.
_EXPONENT = np.int32(0x7F800000)

# Functions that return the array of each plane, or of all planes if it is one.
_Planes = list[Callable[[], Any]]


class _Grid(NamedTuple):
  """Division of an array's blocks into tiles."""

  layout: _block_op.BlockLayout
  group: int  # Blocks of each plane per tile.
  span: int  # Neighbors of a block that the threads have at a time.
  payload: PyTree  # Leaves of the payload, as ShapeDtypeStructs.
  # Number of the first block of each plane in the running kernel's tile.
  first: Any = None

  @property
  def tiles(self) -> int:
    """Number of tiles; the last two may overlap."""
    return -(-self.layout.blocks // self.group)

  @property
  def tile_shape(self) -> tuple[int, int, int]:
    """The shape of a tile: planes, blocks, width."""
    return self.layout.planes, self.group, self.layout.width

  def at_program(self, index: Array) -> "_Grid":
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
    if _dispatch.INTERPRETS_KERNELS:
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
  op: _block_op.BlockOp, like: ShapedLike, *, live: int, reduces: bool
) -> _Grid:
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
  return _Grid(layout, group, span, _block_op.describe_payload(op, like))


def run_pass(spec: _passes.Pass) -> tuple[PyTree, Array | None]:
  """Runs a pass with one kernel; returns the payload and values it writes."""
  op, stacked = spec.op, spec.workers is not None
  grid = make_grid(
    op, spec.like, live=_count_live(spec), reduces=spec.writes_payload
  )
  if spec.aliases and grid.layout.blocks % grid.group:
    # Tiles that overlap would read what another one has written.
    raise NotImplementedError(
      f"the blocks of a plane must be a multiple of {grid.group}, got "
      f"{grid.layout.blocks}"
    )

  def kernel(grid: _Grid, *refs: Any) -> None:
    """Computes one tile: loads its planes, evaluates the pass, stores."""
    arrays, counts, payload, seed, outputs = spec.split_refs(refs)
    sent, decode = _give_payload(spec, payload, grid)

    def compute(
      arrays: list[Array],
      counts: list[Array],
      position: Array,
      seed: list[Array],
      sent: PyTree,
    ) -> Any:
      """Returns what the pass writes of a tile, as one expression to trace."""
      tile = _block_op.Tile(position, None, grid.layout.width)
      values = spec.combine(
        lambda: decode(tile, sent),
        lambda: counts[0],
        *((lambda a=a: a) for a in arrays),
      )
      if not spec.writes_payload:
        return values
      leaves = op.encode_tile(values, tile, seed[0] if seed else None)
      return (values, leaves) if spec.writes_values else leaves

    store = None
    if spec.writes_values:
      store = lambda p, plane: _store(outputs[-1].at[p], grid, plane)
    pieces = _Evaluator(grid).evaluate(
      compute,
      [_give_values(_load_values(ref, grid), grid) for ref in arrays],
      [_give_scalar(ref) for ref in counts],
      _give_position(grid),
      [_give_scalar(ref) for ref in seed],
      sent,
      store=store,
    )
    if spec.writes_payload:
      _store_payload(outputs[: len(shapes)], op, grid, pieces)

  shapes = [grid.layout.leaf_shape(leaf) for leaf in op.leaf_layouts()]
  likes, treedef = jax.tree.flatten(grid.payload)
  outputs = [
    jax.ShapeDtypeStruct(shape, like.dtype)
    for shape, like in zip(shapes, likes, strict=True)
    if spec.writes_payload
  ]
  if spec.writes_values:
    outputs.append(jax.ShapeDtypeStruct(grid.layout[:3], jnp.float32))
  payload = [
    a.reshape(*a.shape[:stacked], *shape)
    for a, shape in zip(spec.payload, shapes, strict=False)
  ]
  arrays = [a.reshape(grid.layout[:3]) for a in spec.arrays]
  inputs = [*arrays, *spec.counts, *payload, *spec.seed]
  found = _call_tiles(
    kernel, spec.kernel_name, grid, inputs, outputs, spec.aliases
  )
  values = found.pop().reshape(spec.like.shape) if spec.writes_values else None
  if not spec.writes_payload:
    return (), values
  leaves = [a.reshape(like.shape) for a, like in zip(found, likes, strict=True)]
  return jax.tree.unflatten(treedef, leaves), values


def _count_live(spec: _passes.Pass) -> int:
  """Returns the number of arrays of one plane that a pass takes at a time."""
  rows = sum(leaf.rows for leaf in spec.op.leaf_layouts() if leaf.per_element)
  live = _WORK + rows * spec.writes_payload + _UPDATE * bool(spec.aliases)
  if not spec.payload:
    return live
  workers = spec.workers or 1
  if workers > _error_memory.MAX_UNROLL_IN_KERNEL:
    return live + spec.op.planes + rows
  return live + workers * rows


def _give_payload(
  spec: _passes.Pass, refs: Sequence[Any], grid: _Grid
) -> tuple[PyTree, Callable[[_block_op.Tile, PyTree], Array]]:
  """Returns the payload as arguments, and the function that decodes it."""
  if not spec.payload:
    return (), lambda tile, sent: sent
  if spec.workers is None:
    sent = [_load_payload(refs, spec.op, grid)]
  elif spec.workers <= _error_memory.MAX_UNROLL_IN_KERNEL:
    sent = [_load_payload(refs, spec.op, grid, w) for w in range(spec.workers)]
  else:
    # Payloads of many workers are added up here, one after another, and the
    # only argument is their sum.
    total = _add_planes(spec, refs, grid)
    planes = [_remember(lambda plane: plane, plane) for plane in total]
    return _give_values(planes, grid), lambda tile, total: total
  return sent, lambda tile, sent: spec.add_workers(
    lambda worker: spec.op.decode_tile(sent[worker], tile)
  )


def _add_planes(
  spec: _passes.Pass, refs: Sequence[Any], grid: _Grid
) -> list[Array]:
  """Returns the planes of the sum of all workers' values, by a loop."""

  def decode_pieces(position: Array, pieces: PyTree) -> Array:
    tile = _block_op.Tile(position, None, grid.layout.width)
    return spec.round_decoded(spec.op.decode_tile(pieces, tile))

  def decode_worker(worker: Any) -> list[Array]:
    pieces = _load_payload(refs, spec.op, grid, worker)
    position = _give_position(grid)
    return _Evaluator(grid).evaluate(decode_pieces, position, pieces)[0]

  return _error_memory.add_in_order(decode_worker, spec.workers or 1, 0)


class _Argument(NamedTuple):
  """An argument of an expression: its planes, and the array it stands for."""

  planes: _Planes
  # Shape and dtype of the array: [planes, blocks, width or 1], or [].
  like: jax.ShapeDtypeStruct


class _Value(NamedTuple):
  """A traced array: its planes, and which axes of the tile it has."""

  planes: _Planes  # One function for each plane, or one for all.
  axes: tuple[int, ...]  # For each axis of the array, the axis of the tile.
  # For each plane the sum of this and earlier ones, if the value is a sum
  # of planes.
  partial: _Planes = []  # noqa: RUF012


class _Evaluator:
  """Evaluates functions of tiles one plane at a time."""

  def __init__(self, grid: _Grid) -> None:
    self._shape, self._widen = grid.tile_shape, grid.widen
    self._values: list[_Value] = []

  def evaluate(
    self,
    fn: Callable[..., PyTree],
    *args: PyTree,
    store: Callable[[int, Array], None] | None = None,
  ) -> list[list[Any]]:
    """Returns the arrays of each leaf of a function of trees of arguments."""
    # `store` takes the number and the array of each plane of the first leaf.
    is_argument = lambda a: isinstance(a, _Argument)
    likes = jax.tree.map(lambda a: a.like, args, is_leaf=is_argument)
    closed = jax.make_jaxpr(fn)(*likes)
    given = jax.tree.leaves(args, is_leaf=is_argument)
    values = [_Value(a.planes, tuple(range(a.like.ndim))) for a in given]
    found = self._run(closed, values)
    for p in range(self._shape[0]):
      # The compiler moves no load before a store, which may be to the same
      # memory. What the next plane needs is therefore loaded first.
      for argument in given:
        for part in argument.planes[p : p + 2]:
          part()
      for value in self._values:
        parts = value.partial or value.planes
        if len(parts) > 1:
          parts[p]()
      if store is not None:
        store(p, found[0].planes[p]())
    rest = found if store is None else found[1:]
    return [[part() for part in value.planes] for value in rest]

  def _run(self, closed: Any, args: Sequence[_Value]) -> list[_Value]:
    """Evaluates a jaxpr on values, equation by equation."""
    values: dict[Any, _Value] = {}

    def read(atom: Any) -> _Value:
      if isinstance(atom, core.jax_core.Literal):
        aval: Any = atom.aval
        return _constant(np.asarray(atom.val, aval.dtype))
      return values[atom]

    jaxpr = closed.jaxpr
    values.update(
      zip(jaxpr.constvars, map(_constant, closed.consts), strict=True)
    )
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
      found = self._apply(eqn, [read(a) for a in eqn.invars])
      self._values += found
      values.update(zip(eqn.outvars, found, strict=True))
    return [read(a) for a in jaxpr.outvars]

  def _apply(self, eqn: Any, args: list[_Value]) -> list[_Value]:
    """Applies one equation to each plane of its operands."""
    name, params = eqn.primitive.name, eqn.params
    if name == "jit":
      return self._run(params["jaxpr"], args)
    if name == "iota":
      return [_number_planes(params)]
    if name in _REDUCTIONS:
      return [self._reduce(name, params["axes"], args[0])]
    if name == "broadcast_in_dim":
      return [_add_axes(params, args[0])]
    if any(v.axes not in ((), (0, 1, 2)) for v in args):
      raise NotImplementedError(f"`{name}` of values without some axes")
    if eqn.outvars[0].aval.shape != np.broadcast_shapes(
      *(a.aval.shape for a in eqn.invars)
    ):
      raise NotImplementedError(f"`{name}` moves elements of a tile")

    def apply_to(p: int) -> Any:
      parts = [v.planes[p if len(v.planes) > 1 else 0]() for v in args]
      return self._bind(eqn, parts)

    count = max(len(v.planes) for v in args)
    planes = [_remember(apply_to, p) for p in range(count)]
    return [_Value(planes, max((v.axes for v in args), key=len))]

  def _bind(self, eqn: Any, parts: list[Any]) -> Any:
    """Applies an elementwise operation to arrays of one plane."""
    name = eqn.primitive.name
    if all(isinstance(a, np.generic) for a in parts):
      with jax.ensure_compile_time_eval():
        return np.asarray(eqn.primitive.bind(*parts, **eqn.params))[()]
    if name == "select_n" and isinstance(parts[0], np.generic):
      return parts[1 + int(parts[0])]
    rank = max(np.ndim(a) for a in parts)
    parts = [self._expand(a, rank) for a in parts]
    if name == "is_finite":
      # Mosaic GPU has no such operation.
      bits = lax.bitcast_convert_type(parts[0], jnp.int32)
      return (bits & _EXPONENT) != _EXPONENT
    return eqn.primitive.bind(*parts, **eqn.params)

  def _expand(self, a: Any, rank: int) -> Any:
    if np.ndim(a) == 0:
      return jnp.broadcast_to(a, self._shape[1 : 1 + rank])
    return self._widen(a) if np.ndim(a) < rank else a

  def _reduce(self, name: str, axes: tuple[int, ...], a: _Value) -> _Value:
    """Reduces a tile within its blocks, or over its planes."""
    within, across = _REDUCTIONS[name]
    if a.axes == (0, 1, 2) and axes == (2,):
      reduce = lambda part: within(self._expand(part(), 2), axis=1)
      return _Value([_remember(reduce, part) for part in a.planes], (0, 1))
    if a.axes == (0, 1, 2) and axes == (0,) and len(a.planes) > 1:
      combine = lambda total, part: across(total(), part())
      totals = [a.planes[0]]
      for part in a.planes[1:]:
        totals.append(_remember(combine, totals[-1], part))
      return _Value(totals[-1:], (1, 2), totals)
    raise NotImplementedError(f"`{name}` along axes {axes}")


def _remember(fn: Callable[..., Any], *args: Any) -> Callable[[], Any]:
  """Returns a function that calls another one once and returns its result."""
  return functools.cache(functools.partial(fn, *args))


def _constant(a: Any) -> _Value:
  return _Value([lambda: np.asarray(a)[()]], ())


def _number_planes(params: Any) -> _Value:
  shape, axis = params["shape"], params["dimension"]
  if axis or shape[1:] != (1, 1):
    raise NotImplementedError("`iota` along blocks or elements")
  numbers = np.arange(shape[0], dtype=params["dtype"])
  return _Value([_remember(lambda n: n, n) for n in numbers], (0, 1, 2))


def _add_axes(params: Any, a: _Value) -> _Value:
  if len(params["shape"]) != 3 or params["broadcast_dimensions"] != a.axes:
    raise NotImplementedError("`broadcast_in_dim` to another tile")
  return a._replace(axes=(0, 1, 2))


def _load_values(ref: Any, grid: _Grid) -> _Planes:
  """Loads a tile of an array as float32."""
  load = lambda p: _load(ref.at[p], grid).astype(jnp.float32)
  return [_remember(load, p) for p in range(grid.layout.planes)]


def _load_payload(
  refs: Sequence[Any], op: _block_op.BlockOp, grid: _Grid, *worker: Any
) -> tuple[list[_Argument], ...]:
  """Returns a tile of a payload as arguments: the pieces of each leaf."""
  _, group, width = grid.tile_shape
  load = lambda ref, row: _load(ref.at[(*worker, row)], grid)

  def give_piece(
    ref: Any, leaf: _block_op.LeafLayout, first: int, rows: int
  ) -> _Argument:
    planes = [_remember(load, ref, first + r) for r in range(rows)]
    shape = rows, group, width if leaf.per_element else 1
    return _Argument(planes, jax.ShapeDtypeStruct(shape, ref.dtype))

  return tuple(
    [give_piece(ref, leaf, *piece) for piece in leaf.pieces]
    for ref, leaf in zip(refs, op.leaf_layouts(), strict=True)
  )


def _store_payload(
  refs: Sequence[Any],
  op: _block_op.BlockOp,
  grid: _Grid,
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


def _give_values(planes: _Planes, grid: _Grid) -> _Argument:
  """Returns a tile of float32 as an argument."""
  return _Argument(planes, jax.ShapeDtypeStruct(grid.tile_shape, jnp.float32))


def _give_scalar(ref: Any) -> _Argument:
  """Returns an array's only element as an argument."""
  load = _remember(lambda: ref[0])
  return _Argument([load], jax.ShapeDtypeStruct((), ref.dtype))


def _give_position(grid: _Grid) -> _Argument:
  """Returns indices in the flat array, uint32, as an argument."""
  _, blocks, width, _ = grid.layout
  shape = grid.tile_shape

  def count_first() -> Array:
    row, element = (
      grid.cast(lax.broadcasted_iota(jnp.int32, shape[1:], d)) for d in range(2)
    )
    block = row + jnp.broadcast_to(grid.first, shape[1:])
    return (block * width + element).astype(jnp.uint32)

  first = _remember(count_first)
  step = blocks * width
  planes = [
    _remember(lambda p: first() + jnp.uint32(p * step), p)
    for p in range(shape[0])
  ]
  return _Argument(planes, jax.ShapeDtypeStruct(shape, jnp.uint32))


def _call_tiles(
  kernel: Callable[..., None],
  name: str,
  grid: _Grid,
  inputs: Sequence[Array],
  outputs: Sequence[jax.ShapeDtypeStruct],
  aliases: dict[int, int],
) -> list[Array]:
  """Runs a kernel once for every tile."""
  from jax.experimental import pallas as pl
  from jax.experimental.pallas import mosaic_gpu as plgpu

  types = [core.shape_varying_like(a.shape, a.dtype, inputs) for a in outputs]
  if _dispatch.INTERPRETS_KERNELS:
    interpreted = pl.pallas_call(
      lambda *refs: kernel(grid.at_program(pl.program_id(0)), *refs),
      grid=(grid.tiles,),
      in_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in inputs],
      out_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in types],
      out_shape=types,
      input_output_aliases=aliases,
      interpret=True,
      name=name,
    )
    return list(interpreted(*inputs))
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


def _load(ref: Any, grid: _Grid) -> Array:
  """Loads the tile's part of one plane: [blocks, width] or [blocks]."""
  if _dispatch.INTERPRETS_KERNELS:
    return ref[grid.rows()]
  from jax.experimental.pallas import mosaic_gpu as plgpu

  layout = _spread(grid.span)
  if len(ref.shape) == 1:
    layout = layout.reduce(1)
  options = {"layout": layout, "optimized": False}
  if jax.__version_info__ < (0, 11):
    return plgpu.load(ref, grid.rows(), **options)
  return plgpu.load(ref.at[grid.rows()], **options)


def _store(ref: Any, grid: _Grid, part: Array) -> None:
  """Stores the tile's part of one plane."""
  if _dispatch.INTERPRETS_KERNELS or jax.__version_info__ < (0, 11):
    ref[grid.rows()] = part
    return
  from jax.experimental.pallas import mosaic_gpu

  plgpu: Any = mosaic_gpu  # Which has no `store` before JAX 0.11.
  plgpu.store(ref.at[grid.rows()], part, optimized=False)
