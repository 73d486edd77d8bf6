"""Top-k selection as Triton kernels: one program for some neighboring lanes.

A thread walks down its lane and keeps the best k entries sorted in registers
(`_insert_entry`). If there are too few lanes to keep the memory busy, several
threads share a lane's planes; their lists are merged at the end
(`_pop_first`).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_layout, _error_memory, _triton
from jaxmotion.kernels.select import _reference

# Elements per tile, four per thread: 16 bytes per load or store.
_TILE = 512
_WIDE = 4
# Elements per thread for which `call_kernel` counts warps.
_PER_THREAD = 16
# Loads of a thread that are in flight together.
_IN_FLIGHT = 8
# With fewer lanes than this, too few loads are in flight to keep a GPU's memory
# busy. Several threads then share the planes of a lane.
_MIN_LANES = 1 << 18
_MAX_GROUPS = 32
# Elements of a lane that a thread holds, at four lanes; and at one, for sums.
_MAX_K = 8
_MAX_SUMMED = 32

_Entry = tuple[Array, Array]


def topk_select(x: Array, *, k: int, planes: int) -> tuple[Array, Array]:
  """Selects the k elements of largest magnitude in every lane."""
  if k > _MAX_K:
    raise NotImplementedError(f"`k` must be at most {_MAX_K}, got {k}")
  lanes = _block_layout.plane_length(x.shape, planes)
  groups = _count_groups(lanes, planes)
  tile = min(_TILE // groups, _triton.power_of_two(lanes))
  rounds = -(-planes // groups)
  padded = rounds * groups * lanes
  _check_size(x, padded)

  def kernel(x_ref: Any, values_ref: Any, places_ref: Any) -> None:
    """Selects in the lanes of one tile, walking down their planes."""
    start = _triton.tile_index() * tile
    group, lane = (
      lax.broadcasted_iota(jnp.int32, (groups, tile), axis) for axis in (0, 1)
    )

    def add_planes(
      best: Sequence[_Entry], first: Any, count: int
    ) -> list[_Entry]:
      """Merges the elements of some planes into each thread's best ones."""
      some = []
      for step in range(count):
        plane = (first + step) * groups + group
        index = plane * lanes + (start + lane)
        inside = _triton.inside_limit(start + lane, lanes, tile)
        # Entries past the last plane get the key 0, the least.
        held = _existing(index, inside, x.size, padded)
        some.append(
          (_triton.load(x_ref, index, held).astype(jnp.float32), plane)
        )
      for value, plane in some:
        best = _insert_entry(best, _reference.to_keys(value), plane)[:k]
      return list(best)

    iterations = max(0, rounds - k) // _IN_FLIGHT
    head = rounds - iterations * _IN_FLIGHT
    best = lax.fori_loop(
      0,
      iterations,
      lambda i, best: add_planes(best, head + i * _IN_FLIGHT, _IN_FLIGHT),
      add_planes([], 0, head),
    )
    lane = start + lax.iota(jnp.int32, tile)
    inside = _triton.inside_limit(lane, lanes, tile)
    for i in range(k):
      key, place, best = _pop_first(best, rounds * groups)
      _triton.store(
        values_ref, i * lanes + lane, _reference.from_keys(key), inside
      )
      _triton.store(places_ref, i * lanes + lane, place, inside)

  return _triton.call_kernel(
    kernel,
    f"topk_select_{k}",
    -(-lanes // tile),
    _PER_THREAD * groups * tile // _WIDE,
    [x],
    (
      jax.ShapeDtypeStruct((k, lanes), jnp.float32),
      jax.ShapeDtypeStruct((k, lanes), jnp.uint32),
    ),
  )


def topk_scatter(
  values: Array, places: Array, *, like: ShapedLike, planes: int
) -> Array:
  """Puts selected values back where they stood, with one kernel."""
  payload = values[None], places[None]
  return _scatter_sum("topk_scatter", payload, like, like.dtype, planes)


def topk_sum(
  values: Array, places: Array, *, like: ShapedLike, planes: int
) -> Array:
  """Scatters and adds the values of several workers with one kernel."""
  return _scatter_sum("topk_sum", (values, places), like, jnp.float32, planes)


def _scatter_sum(
  name: str,
  payload: tuple[Array, Array],
  like: ShapedLike,
  dtype: Any,
  planes: int,
) -> Array:
  """Scatters f32[workers, k, lanes] and adds the results over workers."""
  values, _ = payload
  workers, k, lanes = values.shape
  padded = planes * lanes
  _check_size(like, padded)
  if workers * k > _MAX_SUMMED:
    raise NotImplementedError(
      f"a lane must get at most {_MAX_SUMMED} values, got {workers * k}"
    )
  wide = _WIDE if workers * k <= _MAX_K else 1
  tile = min(_TILE * wide // _WIDE, _triton.power_of_two(lanes))
  size = math.prod(like.shape)

  def kernel(values_ref: Any, places_ref: Any, y_ref: Any) -> None:
    """Writes the lanes of one tile, plane by plane."""
    lane = _triton.tile_index() * tile + lax.iota(jnp.int32, tile)
    inside = _triton.inside_limit(lane, lanes, tile)
    entries = []
    for row in range(workers * k):
      index = row * lanes + lane
      value = _triton.load(values_ref, index, inside)
      place = _triton.load(places_ref, index, inside).astype(jnp.uint32)
      entries.append((value, place))

    def store_plane(plane: Array, _: None) -> None:
      """Stores the sum of the values that workers have in one plane."""

      def decode_worker(worker: int) -> Array:
        y = jnp.zeros((tile,), jnp.float32)
        for value, place in entries[worker * k : worker * k + k]:
          y = jnp.where(place == plane.astype(jnp.uint32), value, y)
        return core.saturate_cast(y, like.dtype).astype(dtype)

      index = plane * lanes + lane
      total = _error_memory.add_in_order(decode_worker, workers, workers)
      _triton.store(y_ref, index, total, _existing(index, inside, size, padded))

    lax.fori_loop(0, planes, store_plane, None)

  return _triton.call_kernel(
    kernel,
    name,
    -(-lanes // tile),
    _PER_THREAD * tile // wide,
    payload,
    jax.ShapeDtypeStruct(like.shape, dtype),
  )


def _count_groups(lanes: int, planes: int) -> int:
  """Returns how many threads share a lane's planes, if lanes are few."""
  groups = 1
  while groups < min(_MAX_GROUPS, planes // (2 * _IN_FLIGHT)):
    if lanes * groups >= _MIN_LANES:
      break
    groups *= 2
  return groups


def _insert_entry(
  best: Sequence[_Entry], key: Array, place: Array
) -> list[_Entry]:
  """Inserts an entry into a sorted list; the least entry comes last."""
  entries, (moved, last) = [], (key, place)
  for other, where in best:
    # Once True for an entry it stays True: those after it all move by one.
    after = key > other
    entries.append(
      (jnp.where(after, moved, other), jnp.where(after, last, where))
    )
    moved, last = jnp.where(after, other, moved), jnp.where(after, where, last)
  return [*entries, (moved, last)]


def _pop_first(
  best: Sequence[_Entry], none: int
) -> tuple[Array, Array, list[_Entry]]:
  """Takes each lane's greatest entry out of the lists of its threads."""
  # `best`: (keys, places) [groups, lanes], sorted in every group.
  # Returns its key and place, and the lists without it.
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


def _existing(
  index: Array, inside: Array | None, size: int, padded: int
) -> Array | None:
  """Returns which indices exist, None if all do: padding does not."""
  return inside if padded == size else _triton.join_masks(index < size, inside)


def _check_size(x: ShapedLike, padded: int) -> None:
  """Raises NotImplementedError for wide values or too many elements."""
  _triton.reject_wide(x)
  if padded >= 2**31:
    raise NotImplementedError(
      f"places must be below 2**31, padding included, got {padded}"
    )
