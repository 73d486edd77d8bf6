"""Selection as Triton kernels: a program for some neighbouring lanes."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels._error_memory import add_in_order
from jaxmotion.kernels._triton import (
  call_kernel,
  load,
  power_of_two,
  store,
  tile_index,
)
from jaxmotion.kernels.select._reference import from_keys, to_keys

# Values of a tile, four a thread: 16 bytes a load or store.
_TILE = 512
_WIDE = 4
# Loads of a thread that are in flight together.
_FLIGHT = 8
# With fewer lanes than this a GPU's memory would wait for threads to ask; then
# several share the planes of a lane out.
_BUSY = 1 << 18
_MOST_GROUPS = 32
# Values of a lane that a thread holds; the most for a sum, of one lane only.
_MOST = 8
_MOST_SUMMED = 32

_Entry = tuple[Array, Array]


def topk_select(
  x: Array, *, k: int, planes: int, interpret: bool = False
) -> tuple[Array, Array]:
  """See `_api`."""
  if k > _MOST:
    raise NotImplementedError(f"`k` must be at most {_MOST}, got {k}")
  lanes = -(-x.size // planes)
  groups = _groups(lanes, planes)
  tile = min(_TILE // groups, power_of_two(lanes))
  rounds = -(-planes // groups)
  padded = rounds * groups * lanes
  _check(x, padded)

  def kernel(x_ref: Any, values_ref: Any, places_ref: Any) -> None:
    start = tile_index() * tile
    group, lane = (
      lax.broadcasted_iota(jnp.int32, (groups, tile), axis) for axis in (0, 1)
    )

    def add(best: Sequence[_Entry], first: Any, count: int) -> list[_Entry]:
      some = []
      for turn in range(count):
        plane = (first + turn) * groups + group
        index = plane * lanes + (start + lane)
        inside = _inside(start + lane, lanes, tile)
        # Places past the last plane get the key 0, the least.
        held = _held(index, inside, x.size, padded)
        some.append((load(x_ref, index, held).astype(jnp.float32), plane))
      for value, plane in some:
        best = _insert(best, to_keys(value), plane)[:k]
      return list(best)

    turns = max(0, rounds - k) // _FLIGHT
    head = rounds - turns * _FLIGHT
    best = lax.fori_loop(
      0,
      turns,
      lambda i, best: add(best, head + i * _FLIGHT, _FLIGHT),
      add([], 0, head),
    )
    lane = start + lax.iota(jnp.int32, tile)
    inside = _inside(lane, lanes, tile)
    for i in range(k):
      key, place, best = _pop(best, rounds * groups)
      store(values_ref, i * lanes + lane, from_keys(key), inside)
      store(places_ref, i * lanes + lane, place, inside)

  return call_kernel(
    kernel,
    f"topk_select_{k}",
    -(-lanes // tile),
    _tile_values(groups * tile, _WIDE),
    [x],
    (
      jax.ShapeDtypeStruct((k, lanes), jnp.float32),
      jax.ShapeDtypeStruct((k, lanes), jnp.uint32),
    ),
    interpret=interpret,
  )


def topk_scatter(
  values: Array,
  places: Array,
  *,
  like: ShapedLike,
  planes: int,
  interpret: bool = False,
) -> Array:
  """See `_api`."""
  return _scatter(
    "topk_scatter",
    values[None],
    places[None],
    like,
    like.dtype,
    planes,
    interpret,
  )


def topk_sum(
  values: Array,
  places: Array,
  *,
  like: ShapedLike,
  planes: int,
  interpret: bool = False,
) -> Array:
  """See `_api`."""
  return _scatter(
    "topk_sum", values, places, like, jnp.float32, planes, interpret
  )


def _scatter(
  name: str,
  values: Array,
  places: Array,
  like: ShapedLike,
  dtype: Any,
  planes: int,
  interpret: bool,
) -> Array:
  """Scatters f32[workers, k, lanes] and adds up over workers."""
  workers, k, lanes = values.shape
  padded = planes * lanes
  _check(like, padded)
  if workers * k > _MOST_SUMMED:
    raise NotImplementedError(
      f"a lane must get at most {_MOST_SUMMED} values, got {workers * k}"
    )
  wide = _WIDE if workers * k <= _MOST else 1
  tile = min(_TILE * wide // _WIDE, power_of_two(lanes))
  size = math.prod(like.shape)

  def kernel(values_ref: Any, places_ref: Any, y_ref: Any) -> None:
    lane = tile_index() * tile + lax.iota(jnp.int32, tile)
    inside = _inside(lane, lanes, tile)
    entries = []
    for row in range(workers * k):
      index = row * lanes + lane
      value = load(values_ref, index, inside)
      entries.append((value, load(places_ref, index, inside)))

    def step(plane: Array, _: None) -> None:
      def decode(worker: int) -> Array:
        y = jnp.zeros((tile,), jnp.float32)
        for value, place in entries[worker * k : worker * k + k]:
          y = jnp.where(place == plane.astype(jnp.uint32), value, y)
        return y.astype(like.dtype).astype(dtype)

      index = plane * lanes + lane
      total = add_in_order(decode, workers, workers)
      store(y_ref, index, total, _held(index, inside, size, padded))

    lax.fori_loop(0, planes, step, None)

  return call_kernel(
    kernel,
    name,
    -(-lanes // tile),
    _tile_values(tile, wide),
    [values, places],
    jax.ShapeDtypeStruct(like.shape, dtype),
    interpret=interpret,
  )


def _groups(lanes: int, planes: int) -> int:
  """How many threads share a lane's planes out, where there are few lanes."""
  groups = 1
  while groups < min(_MOST_GROUPS, planes // (2 * _FLIGHT)):
    if lanes * groups >= _BUSY:
      break
    groups *= 2
  return groups


def _insert(best: Sequence[_Entry], key: Array, place: Array) -> list[_Entry]:
  """Puts an entry where it belongs; the least of all comes last."""
  entries, (moved, last) = [], (key, place)
  for other, where in best:
    # True from one entry on: from there all move, whatever they compare to.
    after = key > other
    entries.append(
      (jnp.where(after, moved, other), jnp.where(after, last, where))
    )
    moved, last = jnp.where(after, other, moved), jnp.where(after, where, last)
  return [*entries, (moved, last)]


def _pop(
  best: Sequence[_Entry], none: int
) -> tuple[Array, Array, list[_Entry]]:
  """Takes the first entry of all groups, of each lane.

  Args:
    best: (keys, places) [groups, lanes], in order in every group.
    none: a place that is greater than all.
  """
  keys, places = best[0]
  key = jnp.max(keys, axis=0)
  place = jnp.min(jnp.where(keys == key[None], places, none), axis=0)
  taken = places == place[None]
  ends = jnp.zeros_like(keys), jnp.full_like(places, none)
  left = [
    (jnp.where(taken, b, a), jnp.where(taken, q, p))
    for (a, p), (b, q) in zip(best, [*best[1:], ends], strict=True)
  ]
  return key, place, left


def _inside(lane: Array, lanes: int, tile: int) -> Array | None:
  return lane < lanes if lanes % tile else None


def _held(
  index: Array, inside: Array | None, size: int, padded: int
) -> Array | None:
  """Which places exist, None if all: in the tile and not in the padding."""
  if padded == size:
    return inside
  held = index < size
  return held if inside is None else held & inside


def _check(x: ShapedLike, padded: int) -> None:
  if jnp.dtype(x.dtype).itemsize > 4:
    raise NotImplementedError(
      f"values must have 32 bits, got {jnp.dtype(x.dtype).name}"
    )
  if padded >= 2**31:
    raise NotImplementedError(
      f"places must be below 2**31, padding included, got {padded}"
    )


def _tile_values(tile: int, wide: int) -> int:
  """What `call` wants to know, for `wide` lanes a thread."""
  return tile * 16 // wide
