"""Layout of an exchange: which arrays are split into shards, and how.

These rules are the contract between the collectives, which follow them, and
the performance model and planner, which predict bytes and seconds from them.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core, hosts, kernels
from jaxmotion.codecs.extend import Division, Partition
from jaxmotion.core import Array, PyTree, ShapedLike

METHODS = (None, "gather", "two_phase")

# A gather sends (N - 1) P bytes, two phases send 2 (N - 1) / N P: equal for 2.
_GATHER_MAX_WORKERS = 2
# Shards of fewer elements consist mostly of scales and padding.
_MIN_SHARD_ELEMENTS = 64
# At most one row in so many may be padding. Codecs of matrices are faster than
# those of vectors, and a vector would be padded too.
_ROWS_PER_PADDING = 64
# Payloads are divided if at most one byte in so many is padding: parts have
# whole blocks.
_BYTES_PER_PADDING = 16
# Largest summable array, in elements, that is joined with others: joining is a
# copy.
_MAX_JOINED_ELEMENTS = 1 << 16
# Fewer values are padded as a whole, by one kernel less.
_MIN_PARTED = 1 << 16
# A stack copies its arrays. That takes longer than it spares for large ones.
_MAX_STACKED_ELEMENTS = 1 << 16
# Most elements of a stack. It is sent when the last of its arrays is there.
_MAX_STACK_ELEMENTS = 1 << 20
# Most elements of the arrays whose means are encoded together, for the same
# reason.
_MAX_BUNDLE_ELEMENTS = 1 << 22


def is_sharded(like: ShapedLike, workers: int) -> bool:
  """Returns whether an array is large enough for one shard per worker.

  >>> is_sharded(jnp.zeros(256), 4), is_sharded(jnp.zeros(255), 4)
  (True, False)
  """
  return math.prod(like.shape) >= _MIN_SHARD_ELEMENTS * workers


def row_like(like: ShapedLike, workers: int) -> jax.ShapeDtypeStruct:
  """Returns the shape of the shard of an array that one worker reduces.

  >>> row_like(jnp.zeros((8, 32)), 4).shape, row_like(jnp.zeros(10), 4).shape
  ((2, 32), (3,))
  >>> [row_like(jnp.zeros((n, 32)), 3).shape for n in (8, 128)]
  [(86,), (43, 32)]
  """
  # A matrix is split into blocks of its rows if hardly any row is padding, and
  # any other array into pieces of a vector.
  size, minor = math.prod(like.shape), like.shape[-1] if like.shape else 1
  count = size // minor if len(like.shape) > 1 and minor else 0
  rows = math.ceil(count / workers)
  if 0 < count and workers * rows - count <= count // _ROWS_PER_PADDING:
    shape: tuple[int, ...] = (rows, minor)
  else:
    shape = (math.ceil(size / workers),)
  return jax.ShapeDtypeStruct(shape, like.dtype)


def find_division(
  codec: codecs.Codec, like: ShapedLike, workers: int
) -> Division | None:
  """Returns how two phases divide payloads between workers, or None.

  >>> like = jnp.zeros((2048, 1024))
  >>> find_division(codecs.sign(), like, 3).like.shape
  (32, 22, 1024)
  >>> find_division(codecs.cast("bfloat16"), like, 3) is None
  True
  """
  # None: they divide the array, because the codec's payloads cannot be divided,
  # or because their parts would be padded much.
  division = codec.division(like, workers)
  if division is None:
    return None
  whole, part = (
    core.tree_bytes(codec.payload_like(a)) for a in (like, division.like)
  )
  padding = workers * part - whole
  return division if padding <= whole // _BYTES_PER_PADDING else None


def part_like(
  codec: codecs.Codec, like: ShapedLike, workers: int
) -> jax.ShapeDtypeStruct:
  """Returns the shape of the array whose mean one worker encodes."""
  division = find_division(codec, like, workers)
  return row_like(like, workers) if division is None else division.like


def shard_like(like: ShapedLike, workers: int) -> jax.ShapeDtypeStruct:
  """Returns the shape of one worker's shard, or of a small array whole."""
  if is_sharded(like, workers):
    return row_like(like, workers)
  return core.shape_dtype(like)


def is_summed(codec: codecs.Codec, like: ShapedLike) -> bool:
  """Says whether the network adds up the payloads of an array."""
  # A sum over workers overflows float16 where their mean does not, so such
  # payloads are summed in float32.
  is_half = codec.keeps_dtype and like.dtype == jnp.float16
  return codec.summable and not is_half


def choose_methods(
  partition: Partition, workers: int, method: str | None
) -> list[str]:
  """Chooses the method that reduces each array of a tree."""
  # method: "gather" or "two_phase" for arrays that are large and not summable;
  # None chooses by the number of workers.
  if method is None:
    few = workers <= _GATHER_MAX_WORKERS
    method = "gather" if few else "two_phase"
  own_codecs = [group.codec for group in partition.leaf_groups]
  arrays = list(zip(own_codecs, partition.array_likes(), strict=True))
  all_summed = all(is_summed(codec, like) for codec, like in arrays)
  methods = []
  for codec, like in arrays:
    if codec.round_kinds:
      methods.append("rounds")
    elif is_summed(codec, like):
      # Between two workers a gather has as many bytes as a sum. So a small
      # summable array is gathered with the others, which saves a collective.
      is_small = math.prod(like.shape) <= _MAX_JOINED_ELEMENTS
      joins = workers == 2 and not all_summed and is_small
      methods.append("gather" if joins else "sum")
    else:
      methods.append(method if is_sharded(like, workers) else "gather")
  return methods


class ArrayPlan(NamedTuple):
  """Method that reduces one array over workers, and its division."""

  codec: codecs.Codec
  like: jax.ShapeDtypeStruct  # Shape, and the dtype that it is encoded in.
  method: str
  workers: int
  division: Division | None  # Of payloads in two phases; None encodes rows.
  op: str  # "mean" or "sum" over workers.

  @property
  def encodes_rows(self) -> bool:
    """Whether two phases encode every row of the array by itself."""
    return self.method == "two_phase" and self.division is None

  @property
  def joins(self) -> bool:
    """Whether the mean is encoded together with those of other arrays."""
    return self.division is not None and _has_blocks(self.codec, self.division)

  @property
  def part(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the array whose mean one worker encodes."""
    if self.division is None:
      return row_like(self.like, self.workers)
    return self.division.like


def plan_arrays(
  partition: Partition,
  workers: int,
  method: str | None,
  *,
  op: str = "mean",
  needs_rows: bool = False,
) -> list[ArrayPlan]:
  """Plans how each array of a tree is reduced: method, dtype, division."""
  # needs_rows: whether two phases encode rows, whatever the codec.
  plans = []
  for group, like, chosen in zip(
    partition.leaf_groups,
    partition.array_likes(),
    choose_methods(partition, workers, method),
    strict=True,
  ):
    codec, division = group.codec, None
    like = jax.ShapeDtypeStruct(like.shape, encode_dtype(codec, like.dtype))
    if chosen == "two_phase" and not needs_rows:
      division = find_division(codec, like, workers)
    plans.append(ArrayPlan(codec, like, chosen, workers, division, op))
  return plans


def find_stacks(plans: Sequence[ArrayPlan]) -> list[list[int]]:
  """Groups arrays that are reduced alike, to encode and decode them as one."""
  # Returns the positions of each group's arrays. The state of an all-reduce is
  # laid out so: it depends on plans alone, which are the same in every step.
  # Payloads that the network adds up stay apart: to make one is an operation or
  # two. Codecs with rounds of their own send as they like.
  keys = [None if plan.method in ("sum", "rounds") else plan for plan in plans]
  sizes = [math.prod(plan.like.shape) for plan in plans]
  return group_alike(keys, sizes, _MAX_STACKED_ELEMENTS)


def group_alike(
  keys: Sequence[Any], sizes: Sequence[int], most: int
) -> list[list[int]]:
  """Groups positions of equal keys, to encode small arrays as one."""
  # Larger arrays stay alone, and those of a key of None.
  pairs = zip(keys, sizes, strict=True)
  keys = [None if size > most else key for key, size in pairs]
  return _group(keys, sizes, _MAX_STACK_ELEMENTS)


def _group(
  keys: Sequence[Any], sizes: Sequence[int], most: int
) -> list[list[int]]:
  """Groups positions of equal keys up to a size; those of None stay alone."""
  groups: list[list[int]] = []
  opened: dict[Any, tuple[list[int], int]] = {}
  for i, (key, size) in enumerate(zip(keys, sizes, strict=True)):
    group, total = opened.get(key, ([], 0))
    if key is None or not group or total + size > most:
      group, total = [], 0
      groups.append(group)
    group.append(i)
    opened[key] = group, total + size
  return groups


class Bundle(NamedTuple):
  """Stacks of arrays whose means are encoded together."""

  stacks: tuple[tuple[int, ...], ...]  # Positions of the arrays of each stack.
  # Of one array with the blocks of all; None if means are encoded apart.
  division: Division | None


def find_bundles(plans: Sequence[ArrayPlan]) -> list[Bundle]:
  """Groups stacks of arrays whose parts are averaged and encoded as one."""
  # Parts of blocks are joined as payloads, which are copied to be sent anyway:
  # large arrays are joined, too. Every block keeps its bits. Random bits are
  # those of an array, so codecs that draw some encode each mean by itself.
  stacks = [tuple(stack) for stack in find_stacks(plans)]
  keys, sizes = [], []
  for i, *others in stacks:
    plan = plans[i]
    planes, _, *width = plan.part.shape if plan.joins else (0, 0)
    kind = plan.codec, planes, *width, plan.part.dtype, plan.op
    keys.append(kind if plan.joins else None)
    sizes.append((1 + len(others)) * math.prod(plan.like.shape))
  return [
    _make_bundle(plans, tuple(stacks[i] for i in group))
    for group in _group(keys, sizes, _MAX_BUNDLE_ELEMENTS)
  ]


def _make_bundle(
  plans: Sequence[ArrayPlan], stacks: tuple[tuple[int, ...], ...]
) -> Bundle:
  """Returns stacks with the division of an array that has all their blocks."""
  plan = plans[stacks[0][0]]
  if plan.division is None or not plan.joins:
    return Bundle(stacks, None)
  planes, _, *width = plan.part.shape
  blocks = sum(plans[i].part.shape[1] for stack in stacks for i in stack)
  part = jax.ShapeDtypeStruct((planes, blocks, *width), plan.part.dtype)
  return Bundle(stacks, dataclasses.replace(plan.division, like=part))


@functools.lru_cache(maxsize=1024)
def _has_blocks(codec: codecs.Codec, division: Division) -> bool:
  """Tells whether parts of arrays are encoded as one part of more blocks."""
  if codec.needs_key:
    return False
  planes, blocks, *width = division.like.shape

  def describe(count: int) -> tuple[int, PyTree, list[tuple[int, ...]]]:
    """Returns the bytes of a payload, a state, and shapes of all leaves."""
    like = jax.ShapeDtypeStruct((planes, count, *width), division.like.dtype)
    payload = codec.payload_like(like)
    shapes: list[tuple[int, ...]] = []
    state = jax.eval_shape(functools.partial(codec.init, like))

    def note_shape(leaf: Array) -> Array:
      # A count of encodings, without axes, is the same for all arrays.
      if leaf.shape or not jnp.issubdtype(leaf.dtype, jnp.integer):
        shapes.append(leaf.shape)
      return leaf

    jax.eval_shape(functools.partial(division.map_blocks, note_shape), state)
    leaves = jax.tree.leaves(jax.eval_shape(division.to_blocks, payload))
    shapes += [leaf.shape for leaf in leaves]
    return core.tree_bytes(payload), state, shapes

  nbytes, state, shapes = describe(blocks)
  more_bytes, _, more_shapes = describe(2 * blocks)
  return (
    not core.shared_parts(state)
    and more_bytes == 2 * nbytes
    and all(one[1:2] == (blocks,) for one in shapes)
    and more_shapes == [(one[0], 2 * blocks, *one[2:]) for one in shapes]
  )


def to_rows(x: Array, axis: int, workers: int) -> Array:
  """Splits `x` along an axis into equal rows: (workers, ...)."""
  return jnp.stack(jnp.split(x, workers, axis))


def pad_to_rows(x: Array, workers: int) -> Array:
  """Pads `x` with zeros and splits it into rows of `row_like(x, workers)`."""
  row = row_like(x, workers)
  rows = x.reshape(-1, *row.shape[1:])
  if padding := workers * row.shape[0] - rows.shape[0]:
    # A codec reads it several times.
    rows = hosts.pad_apart(rows, padding, jnp.zeros((), x.dtype))
  return rows.reshape(workers, *row.shape)


def encode_shards(
  codec: codecs.Codec,
  x: Array,
  workers: int,
  state: PyTree,
  key: core.Key | None,
) -> tuple[PyTree, PyTree]:
  """Splits `x` into rows of `row_like` and encodes each by itself."""
  # Returns payload and state, whose leaves have a leading axis of rows.
  row = row_like(x, workers)
  is_apart = x.size >= _MIN_PARTED and x.size < workers * row.size
  # States of two parts would be joined by a copy.
  if not is_apart or jax.tree.leaves(state):
    return encode_rows(codec, pad_to_rows(x, workers), state, key)
  flat = x.reshape(-1, *row.shape[1:])
  full = flat.shape[0] // row.shape[0]
  # Padding the whole array would be a copy of it, so only what is left beyond
  # the full rows is padded.
  start, padding = full * row.shape[0], workers * row.shape[0] - flat.shape[0]
  left = hosts.pad_apart(flat[start:], padding, jnp.zeros((), x.dtype))
  encode = jax.vmap(lambda x, key: codec.encode(x, state, key)[0])
  keys = _fold_rows(key, workers)
  parts = (slice(full), flat[:start]), (slice(full, workers), left)
  payloads = [
    encode(
      rows.reshape(-1, *row.shape), jax.tree.map(lambda a, i=i: a[i], keys)
    )
    for i, rows in parts
  ]
  return jax.tree.map(lambda *a: jnp.concatenate(a), *payloads), state


def join_flat(rows: Array, shape: tuple[int, ...]) -> Array:
  """Returns the array of a shape that is cut into rows of its elements."""
  return rows.reshape(-1)[: math.prod(shape)].reshape(shape)


def join_rows(rows: Array, like: ShapedLike) -> Array:
  """Joins rows that `pad_to_rows` made to an array, without the padding."""
  if rows.ndim == 3:
    # Whole rows are dropped: then XLA:CPU divides no index once an element.
    minor = rows.shape[2]
    matrix = rows.reshape(-1, minor)
    return matrix[: math.prod(like.shape) // minor].reshape(like.shape)
  size, (workers, width) = math.prod(like.shape), rows.shape
  join: Callable[[Array], Array] = lambda rows: rows.reshape(-1)[:size]
  # Whatever reads a vector divides each index by the width. By a power of two
  # that is a shift.
  if width & (width - 1) and kernels.is_read_slowly((size,), 1, workers, width):
    join = functools.partial(hosts.write_apart, join)
  return join(rows).reshape(like.shape)


def encode_dtype(codec: codecs.Codec, dtype: Any) -> Any:
  """Returns the dtype that arrays are encoded in: float32 at least."""
  # A codec of float32 decodes to float32 too, so sums over workers are made
  # before anything is rounded to the dtype of the array. A codec that keeps the
  # array's dtype gets the array in that dtype.
  return dtype if codec.keeps_dtype else jnp.promote_types(dtype, jnp.float32)


def to_encode_dtype(codec: codecs.Codec, x: Array) -> Array:
  """Returns `x` in the dtype that it is encoded in."""
  return x.astype(encode_dtype(codec, x.dtype))


def encode_rows(
  codec: codecs.Codec, rows: Array, state: PyTree, key: core.Key | None
) -> tuple[PyTree, PyTree]:
  """Encodes each row by itself; payload, state and key have a row axis."""
  return jax.vmap(codec.encode)(rows, state, _fold_rows(key, rows.shape[0]))


def _fold_rows(key: core.Key | None, rows: int) -> core.Key | None:
  """Returns a key for each row, stacked."""
  if key is None:
    return None
  return hosts.write_apart(
    lambda key: jax.vmap(key.fold)(jnp.arange(rows)), key
  )
