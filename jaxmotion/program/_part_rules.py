"""Rules of single operations on one worker's parts of arrays.

A rule gets a step of a program that was traced on whole arrays, and what a
worker holds of the operands. It returns what the worker holds of the results.
An operation without a rule gets whole operands: always right, and what it
computes is then computed by every worker.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmotion import core
from jaxmotion.program._flatten import Step

# In place of a dimension: the worker has a summand, and the sum of all workers'
# is the value.
SUMMAND = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
  """Holds what one worker has of a value."""

  array: Any
  # None: all of it. A dimension: one of as many equal parts along it as there
  # are workers, in their order. `SUMMAND`: a summand.
  dim: int | None = dataclasses.field(default=None, metadata={"static": True})
  # Of weights, which are whole wherever they are computed with: for each
  # dimension the axes of a model that shard it.
  model: tuple[Any, ...] | None = dataclasses.field(
    default=None, metadata={"static": True}
  )

  @property
  def cut(self) -> int | None:
    """Dimension along which the worker has a part, or None."""
    return None if self.dim == SUMMAND else self.dim


Parts = Sequence[Part]


def find_cut(parts: Parts) -> int | None:
  """Returns the dimension along which the first part that is cut is cut."""
  return next((p.dim for p in parts if p.cut is not None), None)


@dataclasses.dataclass(frozen=True)
class Workers:
  """Names the workers between whom values are divided."""

  axis_name: core.AxisName  # As functions of JAX take it.
  count: int
  mesh: Any  # The abstract mesh under which the program was traced.
  # Lengths of whole batches: arrays of random bits of as many rows are taken to
  # be of a batch, so that each worker draws its own rows.
  rows: frozenset[int] = frozenset()

  def whole(self, part: Part) -> Any:
    """Returns the whole value."""
    if part.dim is None:
      return part.array
    if part.dim == SUMMAND:
      return lax.psum(part.array, self.axis_name)
    return lax.all_gather(part.array, self.axis_name, axis=part.dim, tiled=True)

  def take(self, part: Part, dim: int | None) -> Any:
    """Returns the worker's part along a dimension; None: the whole value."""
    if part.dim == dim:
      return part.array
    if dim is None:
      return self.whole(part)
    if part.cut is not None:
      return lax.all_to_all(
        part.array,
        self.axis_name,
        split_axis=dim,
        concat_axis=part.dim,
        tiled=True,
      )
    x = self.whole(part)
    size = x.shape[dim] // self.count
    start = lax.axis_index(self.axis_name) * size
    return lax.dynamic_slice_in_dim(x, start, size, dim)

  def settle(self, parts: Parts) -> list[Part]:
    """Sums what workers hold summands of."""
    return [Part(self.whole(p)) if p.dim == SUMMAND else p for p in parts]


Rule = Callable[[Workers, Step, Parts], Parts]
# The new place of a dimension, and parameters that change; None: a worker needs
# the whole operand.
Placed = tuple[int, dict[str, Any]] | None
# Parameters that say where a whole array lies.
_SHARDINGS = ("dst_sharding", "out_sharding", "sharding")


def run_step(
  step: Step,
  operands: Sequence[Any],
  dim: int | None = None,
  changed: Mapping[str, Any] | None = None,
) -> list[Part]:
  """Runs a step on one worker's arrays; its results are parts along `dim`."""
  # changed: parameters that are others than those of the step.
  primitive, here = step.eqn.primitive, jax.sharding.get_abstract_mesh()
  # Axes of the workers are manual here; those of a model may be explicit.
  explicit = here.explicit_axes
  placed: dict[str, Any] = {}
  for name in step.params.keys() & set(_SHARDINGS):
    spec = getattr(step.params[name], "spec", None)
    own = spec and core.filter_spec(spec, lambda axis: axis in explicit)
    placed[name] = NamedSharding(here, own) if explicit and own else None
  params = {**step.params, **placed, **(changed or {})}
  # The step was traced outside of the map over workers.
  with step.named(), step.eqn.ctx.manager, jax.sharding.use_abstract_mesh(here):
    out = primitive.bind(*operands, **primitive.get_bind_params(params))
  return [Part(x, dim) for x in (out if primitive.multiple_results else [out])]


def run_whole(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Runs a step on whole operands."""
  return run_step(step, list(map(workers.whole, ins)))


def _shape_of(step: Step, i: int) -> tuple[int, ...]:
  """Returns the shape of a whole operand."""
  aval: Any = step.ins[i].aval
  return tuple(aval.shape)


def _skip_removed(dim: int, removed: Sequence[int]) -> int:
  """Returns where a dimension is after others were removed."""
  return dim - sum(d < dim for d in removed)


def _elementwise(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Runs an elementwise operation on a worker's parts of its operands."""
  # All operands are cut along the dimension of the first one that is split. A
  # linear operation on terms of a sum over workers needs no sum yet.
  shape = step.outs[0].shape
  dim = find_cut(ins)
  if dim is None and _keeps_summands(step.name, ins):
    return run_step(step, [p.array for p in ins], SUMMAND)
  operands = [
    # Of an operand of length 1 along the dimension all workers need the same.
    workers.take(p, dim)
    if dim is not None
    and _shape_of(step, i)[dim : dim + 1] == shape[dim : dim + 1]
    else workers.whole(p)
    for i, p in enumerate(ins)
  ]
  return run_step(step, operands, dim)


def _keeps_summands(name: str, ins: Parts) -> bool:
  """Says whether an operation is linear in what workers hold summands of."""
  summands = [p.dim == SUMMAND for p in ins]
  if all(summands):
    return name in _LINEAR
  if name == "mul":
    return sum(summands) == 1
  return name == "div" and summands == [True, False]


def _one_operand(
  place: Callable[[Step, int, int], Placed],
) -> Rule:
  """Makes the rule of an operation that moves the elements of one operand."""
  # place: step, dimension that is cut, and number of workers.

  def rule(workers: Workers, step: Step, ins: Parts) -> list[Part]:
    first, *others = ins
    if first.dim == SUMMAND and step.name in _LINEAR:
      return run_step(step, [first.array], SUMMAND)
    placed = None
    if first.cut is not None:
      placed = place(step, first.cut, workers.count)
    if placed is None:
      return run_whole(workers, step, ins)
    operands = [first.array, *map(workers.whole, others)]
    return run_step(step, operands, int(placed[0]), placed[1])

  return rule


def _set_entry(entries: Sequence[int], i: int, value: int) -> tuple[int, ...]:
  """Returns a shape with another entry."""
  changed = list(entries)
  changed[i] = value
  return tuple(changed)


def _place_broadcast(step: Step, dim: int, count: int) -> Placed:
  """Follows the dimension that an operand's becomes."""
  shape = step.params["shape"]
  new = int(step.params["broadcast_dimensions"][dim])
  return new, {"shape": _set_entry(shape, new, shape[new] // count)}


def _place_reshape(step: Step, dim: int, count: int) -> Placed:
  """Follows a dimension that is joined with others, or divided."""
  old, new = _shape_of(step, 0), step.params["new_sizes"]
  before = math.prod(old[:dim])
  for i, size in enumerate(new):
    # The major dimension of those that are joined or divided: a worker's part
    # is contiguous in it.
    starts_there = math.prod(new[:i]) == before and size > 1
    if starts_there and size % count == 0:
      if size % old[dim] == 0 or old[dim] % size == 0:
        return i, {"new_sizes": _set_entry(new, i, size // count)}
  return None


def _place_transpose(step: Step, dim: int, count: int) -> Placed:
  """Follows a dimension to its new position."""
  return step.params["permutation"].index(dim), {}


def _place_squeeze(step: Step, dim: int, count: int) -> Placed:
  """Follows a dimension past those that are removed."""
  return _skip_removed(dim, step.params["dimensions"]), {}


def _place_expanded(step: Step, dim: int, count: int) -> Placed:
  """Follows a dimension past those that are added."""
  for added in sorted(step.params["dimensions"]):
    dim += added <= dim
  return dim, {}


def _place_slice(step: Step, dim: int, count: int) -> Placed:
  """Keeps a dimension that is not cut."""
  size, params = _shape_of(step, 0)[dim], step.params
  limits = params["limit_indices"]
  stride = (params["strides"] or [1] * len(limits))[dim]
  if (params["start_indices"][dim], limits[dim], stride) != (0, size, 1):
    return None
  return dim, {"limit_indices": _set_entry(limits, dim, size // count)}


def _place_dynamic_slice(step: Step, dim: int, count: int) -> Placed:
  """Keeps a dimension that is taken whole."""
  sizes, size = step.params["slice_sizes"], _shape_of(step, 0)[dim]
  if sizes[dim] != size:
    return None
  return dim, {"slice_sizes": _set_entry(sizes, dim, size // count)}


def _place_padded(step: Step, dim: int, count: int) -> Placed:
  """Keeps a dimension that gets no padding."""
  is_kept = tuple(step.params["padding_config"][dim]) == (0, 0, 0)
  return (dim, {}) if is_kept else None


def _place_window(step: Step, dim: int, count: int) -> Placed:
  """Keeps a dimension in which windows have one element."""
  params = step.params
  window = params["window_dimensions"][dim], params["window_strides"][dim]
  is_kept = window == (1, 1) and tuple(params["padding"][dim]) == (0, 0)
  return (dim, {}) if is_kept else None


def _place_index_reduced(step: Step, dim: int, count: int) -> Placed:
  """Follows a dimension that no index is taken along."""
  axes = step.params["axes"]
  return None if dim in axes else (_skip_removed(dim, axes), {})


def _place_filtered(step: Step, dim: int, count: int) -> Placed:
  """Says where the samples of a convolution are."""
  names = step.params["dimension_numbers"]
  # Groups of samples have filters of their own.
  is_batch = dim == names.lhs_spec[0] and step.params["batch_group_count"] == 1
  return (names.out_spec[0], {}) if is_batch else None


def _along(parameter: str) -> Rule:
  """Makes the rule of an operation along some dimensions of its operands."""

  def rule(workers: Workers, step: Step, ins: Parts) -> list[Part]:
    used = step.params[parameter]
    used = used if isinstance(used, tuple | list) else (used,)
    dim = find_cut(ins)
    if dim is None or dim in used:
      return run_whole(workers, step, ins)
    return run_step(step, [workers.take(p, dim) for p in ins], dim)

  return rule


_JOINS: dict[str, Callable[..., Any]] = {
  "reduce_max": jnp.max,
  "reduce_min": jnp.min,
  "reduce_prod": jnp.prod,
  "reduce_and": jnp.all,
  "reduce_or": jnp.any,
}


def _reduce(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Reduces parts; a sum over the workers' dimension leaves summands."""
  (part,), axes = ins, step.params["axes"]
  if step.name != "reduce_sum":
    (part,) = workers.settle(ins)
  if part.cut is None:
    return run_step(step, [part.array], part.dim)
  if part.cut not in axes:
    return run_step(step, [part.array], _skip_removed(part.cut, axes))
  if step.name == "reduce_sum":
    return run_step(step, [part.array], SUMMAND)
  # JAX cannot differentiate its collective maximum.
  (own,) = run_step(step, [part.array])
  every = lax.all_gather(own.array, workers.axis_name)
  return [Part(_JOINS[step.name](every, axis=0))]


class _Side(NamedTuple):
  """Dimensions of one operand of `dot_general`."""

  contracted: Sequence[int]
  batch: Sequence[int]
  free: Sequence[int]  # The others, in order.


def _multiply_matrices(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Multiplies parts; contracting the split dimension leaves summands."""
  dims = [p.dim for p in ins]
  if SUMMAND in dims and None in dims:
    # A product is linear in each operand.
    return run_step(step, [p.array for p in ins], SUMMAND)
  ins = workers.settle(ins)  # None is a summand any more.
  contracted, batch = step.params["dimension_numbers"]
  sides = [
    _Side(
      contracted[i],
      batch[i],
      [
        d
        for d in range(jnp.ndim(ins[i].array))
        if d not in contracted[i] and d not in batch[i]
      ],
    )
    for i in range(2)
  ]
  # For each operand: dimension of it -> that of the other that it goes with.
  mates = [
    dict(
      zip(
        (*sides[i].contracted, *sides[i].batch),
        (*sides[1 - i].contracted, *sides[1 - i].batch),
        strict=True,
      )
    )
    for i in range(2)
  ]

  def rank(i: int) -> int:
    """Ranks an operand: the first decides, and the other follows it."""
    dim = ins[i].dim
    if dim is None:
      return 3
    if dim in sides[i].free:
      return 1
    # A dimension that both have is best. Where the other operand, such as a
    # batch, is cut elsewhere, this one is gathered, such as weights.
    return 0 if ins[1 - i].dim in (None, mates[i][dim]) else 2

  i = min(range(2), key=rank)
  own, dim = sides[i], ins[i].dim
  if dim is None:
    return run_whole(workers, step, ins)
  mate: int | None = mates[i].get(dim)
  if dim in own.contracted:
    out_dim = SUMMAND
  elif dim in own.batch:
    out_dim = list(own.batch).index(dim)
  else:
    free_before = len(sides[0].free) if i else 0
    out_dim = len(own.batch) + free_before + own.free.index(dim)
  operands = [ins[0].array, ins[1].array]
  operands[1 - i] = workers.take(ins[1 - i], mate)
  return run_step(step, operands, out_dim)


def _gather(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Looks rows up where indices, batches or whole rows are split."""
  operand, indices = workers.settle(ins)
  names, sizes = step.params["dimension_numbers"], step.params["slice_sizes"]
  shape, rank = _shape_of(step, 0), len(step.outs[0].shape)
  # Dimensions of the indices but their last one, in order.
  batch = [d for d in range(rank) if d not in names.offset_dims]
  pairs = dict(
    zip(
      names.operand_batching_dims,
      names.start_indices_batching_dims,
      strict=True,
    )
  )
  if operand.dim in pairs:
    dim = pairs[operand.dim]
    indices = Part(workers.take(indices, dim), dim)
  elif operand.dim is not None:
    removed = (*names.collapsed_slice_dims, *names.operand_batching_dims)
    kept = [d for d in range(len(shape)) if d not in removed]
    dim = operand.dim
    if dim in kept and dim not in names.start_index_map:
      return run_step(
        step,
        [operand.array, workers.whole(indices)],
        names.offset_dims[kept.index(dim)],
        {"slice_sizes": _set_entry(sizes, dim, sizes[dim] // workers.count)},
      )
    operand = Part(workers.whole(operand))
  if indices.dim is None:
    return run_whole(workers, step, [operand, indices])
  mates = {b: a for a, b in pairs.items()}
  x, rows = workers.take(operand, mates.get(indices.dim)), indices.array
  # One of two axes that are left to XLA may divide both. XLA (JAX 0.10 to 0.12)
  # then ends the process: "partition_group_list.num_replica_groups()".
  if len(jax.sharding.get_abstract_mesh().auto_axes) > 1:
    if indices.dim not in mates:
      spec: list[Any] = [None] * x.ndim
      for d in names.start_index_map:
        spec[d] = PartitionSpec.UNCONSTRAINED
      x = lax.with_sharding_constraint(x, PartitionSpec(*spec))
      rows = lax.with_sharding_constraint(rows, PartitionSpec())
    elif _picks_one(step, x, rows):
      return [Part(_pick_one(step, x, rows), batch[indices.dim])]
  return run_step(step, [x, rows], batch[indices.dim])


def _picks_one(step: Step, x: Any, indices: Any) -> bool:
  """Returns whether a lookup picks one number of each row, in order."""
  # Such as that of a label's logit in a cross entropy, by `take_along_axis`.
  # Its `fill_value` is None where indices outside are clipped, not filled.
  names, kept = step.params["dimension_numbers"], range(x.ndim - 1)
  return (
    core.is_inexact(x)
    and names.start_index_map == (x.ndim - 1,)
    and names.operand_batching_dims == tuple(kept)
    and names.start_indices_batching_dims == tuple(kept)
    and indices.size * x.shape[-1] == x.size
    and step.params["fill_value"] is not None
  )


def _pick_one(step: Step, x: Any, indices: Any) -> Any:
  """Picks one number of each row by comparisons, which the compiler divides."""
  wanted = indices.reshape((*x.shape[:-1], 1))
  places = lax.broadcasted_iota(wanted.dtype, x.shape, x.ndim - 1)
  picked = jnp.where(places == wanted, x, jnp.zeros((), x.dtype))
  out = jnp.sum(picked, -1, keepdims=True)
  inside = (wanted >= 0) & (wanted < x.shape[-1])
  fill = jnp.asarray(step.params["fill_value"], x.dtype)
  return jnp.where(inside, out, fill).reshape(indices.shape[:-1])


def _scatter(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Writes into rows of which every worker has its own."""
  operand, indices, updates = workers.settle(ins)
  names, dim = step.params["dimension_numbers"], operand.dim
  removed = (*names.inserted_window_dims, *names.operand_batching_dims)
  kept = [d for d in range(jnp.ndim(operand.array)) if d not in removed]
  if dim not in kept or dim in names.scatter_dims_to_operand_dims:
    return run_whole(workers, step, ins)
  update_dim = names.update_window_dims[kept.index(dim)]
  if _shape_of(step, 2)[update_dim] != _shape_of(step, 0)[dim]:
    return run_whole(workers, step, ins)
  rows = workers.take(updates, update_dim)
  return run_step(step, [operand.array, workers.whole(indices), rows], dim)


def _update_slice(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Writes a slice that is whole along the split dimension."""
  operand, update, *starts = workers.settle(ins)
  dim = find_cut([operand, update])
  if dim is None or _shape_of(step, 0)[dim] != _shape_of(step, 1)[dim]:
    return run_whole(workers, step, ins)
  both = [workers.take(p, dim) for p in (operand, update)]
  return run_step(step, [*both, *map(workers.whole, starts)], dim)


def _constrain(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Keeps a constraint's other axes: those of the workers are manual here."""
  (part,) = workers.settle(ins)
  wanted = step.params.get("sharding", step.params.get("dst_sharding"))
  spec = getattr(wanted, "spec", PartitionSpec())
  names = core.axis_names(workers.axis_name)
  own = core.filter_spec(spec, lambda name: name not in names)
  if not any(own):
    return [part]
  if step.name == "reshard":
    return [Part(jax.sharding.reshard(part.array, own), part.dim)]
  return [Part(lax.with_sharding_constraint(part.array, own), part.dim)]


def _place_same(step: Step, dim: int, count: int) -> Placed:
  """Keeps a dimension, unless bits of the last one are joined."""
  return (dim, {}) if dim < len(step.outs[0].shape) else None


def _draw_bits(workers: Workers, step: Step, ins: Parts) -> list[Part]:
  """Draws a worker's own rows of the random bits of a batch."""
  (key,) = ins
  shape, width = step.params["shape"], step.params["bit_width"]
  is_own = (
    shape[:1]
    and shape[0] in workers.rows
    and math.prod(shape) < 2**32
    and width == 32
    and key.dim is None
    and core.draws_by_place(key.array)
  )
  if not is_own:
    return run_whole(workers, step, ins)
  own = (shape[0] // workers.count, *shape[1:])
  first = lax.axis_index(workers.axis_name).astype(jnp.uint32)
  places = lax.iota(jnp.uint32, math.prod(own)) + first * math.prod(own)
  return [Part(core.draw_bits(key.array, places.reshape(own)), 0)]


_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
cbrt ceil clamp clz convert_element_type copy copy_p cos cosh digamma div eq
erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma
log log1p logistic lt max min mul name ne neg nextafter not or polygamma
population_count pow real reduce_precision rem round rsqrt select_n shift_left
shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
stop_gradient sub tan tanh xor
""".split()
# Linear in all operands that are summands.
_LINEAR = frozenset(
  """
  add add_any broadcast_in_dim convert_element_type copy copy_p expand_dims
  imag name neg real reduce_sum reshape slice squeeze sub transpose
  """.split()
)
RULES: dict[str, Rule] = {
  **dict.fromkeys(_ELEMENTWISE, _elementwise),
  **dict.fromkeys(["reduce_sum", *_JOINS], _reduce),
  **dict.fromkeys(
    "reduce_window_max reduce_window_min reduce_window_sum".split(),
    _one_operand(_place_window),
  ),
  **dict.fromkeys(["argmax", "argmin"], _one_operand(_place_index_reduced)),
  **dict.fromkeys(
    "cumlogsumexp cummax cummin cumprod cumsum".split(), _along("axis")
  ),
  **dict.fromkeys("scatter scatter-add scatter_add".split(), _scatter),
  "bitcast_convert_type": _one_operand(_place_same),
  "broadcast_in_dim": _one_operand(_place_broadcast),
  "concatenate": _along("dimension"),
  "conv_general_dilated": _one_operand(_place_filtered),
  "dot_general": _multiply_matrices,
  "dynamic_slice": _one_operand(_place_dynamic_slice),
  "dynamic_update_slice": _update_slice,
  "expand_dims": _one_operand(_place_expanded),
  "gather": _gather,
  "pad": _one_operand(_place_padded),
  "random_bits": _draw_bits,
  "reshape": _one_operand(_place_reshape),
  "reshard": _constrain,
  "rev": _along("dimensions"),
  "sharding_constraint": _constrain,
  "slice": _one_operand(_place_slice),
  "sort": _along("dimension"),
  "split": _along("axis"),
  "squeeze": _one_operand(_place_squeeze),
  "transpose": _one_operand(_place_transpose),
}
