"""Top-k selection in every lane of an array cut into planes, as `jax.numpy`.

A lane has one element of each plane. Lanes are compared side by side, by
vector instructions over contiguous planes; nothing is sorted for small k.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, ShapedLike, saturate_cast
from jaxmotion.kernels._error_memory import sum_decoded

# Up to this many elements take one reduction each; more, a sort of every lane.
_MAX_REDUCE = 8
# Planes compared by one expression. XLA:CPU uses vectors for it, unlike for a
# reduction over pairs (4x).
_GROUP = 16


def topk_select(x: Array, *, k: int, planes: int) -> tuple[Array, Array]:
  """Returns the k elements of largest magnitude of every lane and their planes.

  Up to `_MAX_REDUCE` of them, each is one reduction over planes that skips what
  was found before; beyond, every lane is sorted.
  """
  cut = _cut_planes(x, planes)
  if k > _MAX_REDUCE:
    top, places = lax.top_k(to_keys(cut).T, k)
    return from_keys(top.T), places.T.astype(jnp.uint32)
  found = [_next_largest(cut, None)]
  for _ in range(k - 1):
    found.append(_next_largest(cut, found[-1]))
  top, places = (jnp.stack(a) for a in zip(*found, strict=True))
  return from_keys(top), places


def topk_scatter(
  values: Array, places: Array, *, like: ShapedLike, planes: int
) -> Array:
  """Puts selected values back where they stood, with zeros elsewhere."""
  k, lanes = values.shape
  dense = jnp.zeros((planes, lanes), jnp.float32)
  if k > _MAX_REDUCE:
    dense = dense.at[places, jnp.arange(lanes)[None]].set(values)
  else:
    # Compare and select fuse into whatever reads the result. A scatter does
    # not, and writes the zeros in a separate pass. `plane` is a column: XLA
    # would hoist a whole array out of loops, to memory.
    plane = jnp.arange(planes, dtype=jnp.uint32)[:, None]
    for i in range(k):
      dense = jnp.where(plane == places[i, None], values[i, None], dense)
  size = math.prod(like.shape)
  flat = dense.reshape(-1)
  flat = flat if flat.size == size else flat[:size]
  return saturate_cast(flat.reshape(like.shape), like.dtype)


def topk_sum(
  values: Array, places: Array, *, like: ShapedLike, planes: int
) -> Array:
  """Scatters the selected values of several workers and adds them."""

  def decode(payload: tuple[Array, Array], like: ShapedLike) -> Array:
    return topk_scatter(*payload, like=like, planes=planes)

  return sum_decoded(decode, (values, places), like)


def _cut_planes(x: Array, planes: int) -> Array:
  flat = x.reshape(-1).astype(jnp.float32)
  lanes = -(-x.size // planes)
  if planes * lanes != x.size:
    # By a gather rather than `jnp.pad`: XLA:CPU writes a padded array to memory
    # first.
    index = lax.iota(jnp.int32, planes * lanes)
    held = flat.at[jnp.minimum(index, x.size - 1)].get(mode="promise_in_bounds")
    flat = jnp.where(index < x.size, held, 0.0)
  return flat.reshape(planes, lanes)


def to_keys(x: Array) -> Array:
  """Returns integers in the order of magnitudes: the sign is the lowest bit."""
  u = lax.bitcast_convert_type(x, jnp.uint32)
  return (u << 1) | (u >> 31)


def from_keys(keys: Array) -> Array:
  """Returns the floats that `to_keys` maps to these keys."""
  return lax.bitcast_convert_type((keys >> 1) | (keys << 31), jnp.float32)


def _next_largest(
  x: Array, after: tuple[Array, Array] | None
) -> tuple[Array, Array]:
  """Returns the first (key, plane) of each lane, or the first after another.

  Entries are ordered by falling key, then by rising plane.

  Args:
    x: f32[planes, lanes].
    after: (keys, planes) [lanes] found last; None looks for the first.
  """
  planes = x.shape[0]
  group = max(1, min(_GROUP, planes // 2))

  def best_of_planes(
    best: list[Any], start: Any, count: int
  ) -> tuple[Array, Array]:
    some = to_keys(lax.dynamic_slice_in_dim(x, start, count))
    pairs = []
    for i, key in enumerate(some):
      plane = jnp.broadcast_to(start + jnp.uint32(i), key.shape)
      if after is not None:
        left = (key < after[0]) | ((key == after[0]) & (plane > after[1]))
        # A key of 0 past the last plane loses against every entry left.
        key = jnp.where(left, key, jnp.uint32(0))
        plane = jnp.where(left, plane, jnp.uint32(planes))
      pairs.append((key, plane))
    return _best_pair([*best, *pairs], after is not None)

  def add_group(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
    return best_of_planes([best], i.astype(jnp.uint32) * group, group)

  # A loop of at least two iterations, not one expression: XLA:CPU would fuse
  # all of it with the next call, and repeat every comparison many times.
  # Computed from x, so that its type varies over the workers if that of x does.
  least = to_keys(x[0]) & jnp.uint32(0)
  best = least, least + jnp.uint32(0 if after is None else planes)
  best = lax.fori_loop(0, planes // group, add_group, best)
  if planes % group:
    start = planes - planes % group
    best = best_of_planes([best], jnp.uint32(start), planes % group)
  return best


def _best_pair(
  pairs: list[tuple[Array, Array]], masked: bool
) -> tuple[Array, Array]:
  """Returns the largest key and its least plane, of pairs in plane order.

  Args:
    pairs: keys and planes, [lanes] each.
    masked: whether some planes are out of order.
  """

  def earlier_of(
    a: tuple[Array, Array], b: tuple[Array, Array]
  ) -> tuple[Any, ...]:
    takes = a[0] >= b[0]
    if masked:
      takes = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(takes, a[0], b[0]), jnp.where(takes, a[1], b[1])

  while len(pairs) > 1:
    halves = zip(pairs[::2], pairs[1::2], strict=False)
    odd = pairs[-1:] if len(pairs) % 2 else []
    pairs = [earlier_of(a, b) for a, b in halves] + odd
  return pairs[0]
