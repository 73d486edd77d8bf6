"""Selection of elements, by magnitude and at random, as `jax.numpy`.

Top-k selects in every lane of an array cut into planes. A lane has one element
of each plane. Lanes are compared side by side, by vector instructions over
contiguous planes; for small k nothing else is needed. Stratified sampling draws
one position from each of k contiguous runs.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.core import Array, ShapedLike
from jaxmotion.kernels import _block_layout, _error_memory
from jaxmotion.kernels.pack import _reference as packing

# Up to this many elements take one reduction each; more, XLA's own selection.
_MAX_REDUCE = 8
# Planes compared by one expression. XLA:CPU uses vectors for it, unlike for a
# reduction over pairs (4x).
_GROUP = 8
# Smaller arrays are padded as a whole, by one kernel less.
_MIN_PARTED = 1 << 16


def topk_select(x: Array, *, k: int, planes: int) -> tuple[Array, Array]:
  """Returns the k elements of most magnitude of a lane, and their planes."""
  # Up to `_MAX_REDUCE` of them, each is one reduction over planes that skips
  # what was found before; beyond, XLA selects them itself.
  lanes = _block_layout.plane_length(x.shape, planes)
  if k > _MAX_REDUCE:
    cut = _pad_flat(x, planes * lanes).reshape(planes, lanes)
    _, places = lax.top_k(_to_ordered_floats(cut).T, k)
    return jnp.take_along_axis(cut, places.T, 0), places.T.astype(jnp.uint32)
  full, rest = divmod(x.size, lanes or 1)
  last = None
  if x.size < _MIN_PARTED or k > full + bool(rest):
    flat, full = _pad_flat(x, planes * lanes), planes
  else:
    # A padded array would be a copy of it, so only its last plane is padded.
    # Planes beyond are zeros, of which those that stand first are kept.
    flat = x.reshape(-1).astype(jnp.float32)
    if rest:
      last = _pad_flat(flat[full * lanes :], lanes)
  take = lambda i: lax.dynamic_slice_in_dim(flat, i * lanes, lanes)
  found = [_next_largest(take, full, last, None)]
  for _ in range(k - 1):
    found.append(_next_largest(take, full, last, found[-1]))
  top, places = (jnp.stack(a) for a in zip(*found, strict=True))
  return from_keys(top), places


def topk_scatter(
  values: Array, places: Array, *, like: ShapedLike, planes: int
) -> Array:
  """Puts selected values back where they stood, with zeros elsewhere."""
  shape = planes, 1, values.shape[-1]
  scatter = lambda payload, like: _scatter(payload, like, planes)
  return _block_layout.read_blocks(scatter, (values, places), shape, like)


def topk_sum(
  values: Array, places: Array, *, like: ShapedLike, planes: int
) -> Array:
  """Scatters the selected values of several workers and adds them."""

  def add_up(payloads: tuple[Array, Array], like: ShapedLike) -> Array:
    if payloads[0].shape[1] > _MAX_REDUCE and like.dtype == jnp.float32:
      return _scatter_sum(payloads, like, planes)
    return _error_memory.sum_decoded(
      lambda payload, like: _scatter(payload, like, planes), payloads, like
    )

  shape = planes, 1, values.shape[-1]
  return _block_layout.read_blocks(add_up, (values, places), shape, like)


def _scatter(
  payload: tuple[Array, Array], like: ShapedLike, planes: int
) -> Array:
  """Puts the selected values of one payload among zeros."""
  values, places = payload
  k, lanes = values.shape
  minor = like.shape[-1] if len(like.shape) > 1 else 1
  if k > _MAX_REDUCE:
    return _scatter_sum((values[None], places[None]), like, planes)
  # In rows of the array if lanes are whole rows: XLA:CPU then divides once a
  # row to find an element's plane, and else once an element.
  shape = (lanes // minor, minor) if minor and not lanes % minor else (lanes,)
  values, places = values.reshape(k, *shape), places.reshape(k, *shape)
  dense = jnp.zeros((planes, *shape), jnp.float32)
  # Compare and select fuse into whatever reads the result. A scatter does
  # not, and writes the zeros in a separate pass. `plane` is a column: XLA
  # would hoist a whole array out of loops, to memory.
  plane = jnp.arange(planes, dtype=places.dtype)
  plane = plane.reshape(planes, *(1 for _ in shape))
  for i in range(k):
    dense = jnp.where(plane == places[i, None], values[i, None], dense)
  return _block_layout.from_blocks(dense, like)


def _scatter_sum(
  payloads: tuple[Array, Array], like: ShapedLike, planes: int
) -> Array:
  """Adds the selected values of workers to zeros, one worker after another."""
  values, places = payloads
  workers, _, lanes = values.shape
  lane = jnp.arange(lanes, dtype=jnp.uint32)[None]
  # Columns of a matrix may be tiles: then a transpose follows, which copies
  # whole rows of a tile if the elements of a column are side by side.
  is_turned = like.shape == (planes, lanes)
  turn = jnp.transpose if is_turned else jnp.asarray

  def find_places(worker: Any) -> tuple[Array, Array]:
    index = turn(places[worker].astype(jnp.uint32)), turn(lane)
    return index[::-1] if is_turned else index

  def add_worker(worker: Any, dense: Array) -> Array:
    at = dense.at[find_places(worker)]
    return at.add(turn(values[worker]), unique_indices=True)

  shape = (lanes, planes) if is_turned else (planes, lanes)
  dense = jnp.zeros(shape, jnp.float32)
  dense = dense.at[find_places(0)].set(turn(values[0]))
  dense = lax.fori_loop(1, workers, add_worker, dense)
  return _block_layout.from_blocks(turn(dense), like)


def _pad_flat(x: Array, size: int) -> Array:
  """Returns the flat array, float32, with zeros up to a size."""
  flat = x.reshape(-1).astype(jnp.float32)
  if padding := size - x.size:
    flat = hosts.pad_apart(
      flat, padding, jnp.float32(0)
    )  # Several loops read it.
  return flat


def to_keys(x: Array) -> Array:
  """Returns integers in the order of magnitudes: the sign is the lowest bit."""
  u = lax.bitcast_convert_type(x, jnp.uint32)
  return (u << 1) | (u >> 31)


def from_keys(keys: Array) -> Array:
  """Returns the floats that `to_keys` maps to these keys."""
  return lax.bitcast_convert_type((keys >> 1) | (keys << 31), jnp.float32)


def _to_ordered_floats(x: Array) -> Array:
  """Returns float32 whose total order is that of the keys."""
  # XLA:CPU selects floats and sorts whole lanes of integers, which takes 8 to
  # 40 times as long.
  keys = lax.bitcast_convert_type(to_keys(x) ^ jnp.uint32(1 << 31), jnp.int32)
  # Negative floats have the reverse order of their bits.
  bits = jnp.where(keys < 0, keys ^ jnp.int32(0x7FFFFFFF), keys)
  return lax.bitcast_convert_type(bits, jnp.float32)


def _next_largest(
  take: Callable[[Any], Array],
  planes: int,
  last: Array | None,
  after: tuple[Array, Array] | None,
) -> tuple[Array, Array]:
  """Returns the greatest entry of each lane, or the one after another."""
  # Entries are ordered by falling key, then by rising plane.
  # `take`: function from the number of a plane to its elements, f32[lanes].
  # `after`: (keys, planes) [lanes] found last; None looks for the first.
  # A power of two: of 15 planes XLA:CPU makes several loops (3x).
  group = min(_GROUP, 1 << max(0, (planes - 1).bit_length() - 1))
  count = max(2, -(-planes // group))
  beyond = planes + (last is not None)

  def add_group(
    number: Array, best: tuple[Array, Array]
  ) -> tuple[Array, Array]:
    """Takes the best of the entries so far and of a group of planes."""
    # The last group may overlap the one before: to see a plane twice changes
    # nothing, and code for fewer planes would be repeated for each of its uses.
    start = jnp.minimum(number * group, planes - group).astype(jnp.uint32)
    # XLA:CPU would copy one slice of the whole group to memory, and take twice
    # as long. It fuses a slice of each plane.
    places = [start + jnp.uint32(i) for i in range(group)]
    pairs = [make_pair(take(place), place) for place in places]
    return _best_pair([best, *pairs], after is not None)

  def make_pair(x: Array, place: Array) -> tuple[Array, Array]:
    """Returns a plane's entries, the least key for those found before."""
    key = to_keys(x)
    plane = jnp.broadcast_to(place, key.shape)
    if after is not None:
      left = (key < after[0]) | ((key == after[0]) & (plane > after[1]))
      # A key of 0 past the last plane loses against every entry left.
      key = jnp.where(left, key, jnp.uint32(0))
      plane = jnp.where(left, plane, jnp.uint32(beyond))
    return key, plane

  # A loop of at least two iterations, not one expression: XLA:CPU would fuse
  # all of it with the next call, and repeat every comparison many times.
  # Computed from a plane, so that its type varies over the workers if that of x
  # does.
  least = to_keys(take(jnp.uint32(0))) & jnp.uint32(0)
  best = least, least + jnp.uint32(0 if after is None else beyond)
  best = lax.fori_loop(0, count, add_group, best)
  if last is None:
    return best
  pair = make_pair(last, jnp.uint32(planes))
  return _best_pair([best, pair], after is not None)


def _best_pair(
  pairs: list[tuple[Array, Array]], masked: bool
) -> tuple[Array, Array]:
  """Returns the largest key of each lane and the first plane that has it."""
  # `pairs`: keys and planes, [lanes] each.

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


def stratum_sizes(size: int, k: int) -> Array:
  """Returns the lengths of k contiguous runs that make up `size`, int32[k].

  They are floor(size / k) or one more, the longer ones first.

  >>> stratum_sizes(10, 4).tolist()
  [3, 3, 2, 2]
  """
  short, longer = divmod(size, max(1, k))
  return short + (lax.iota(jnp.int32, k) < longer).astype(jnp.int32)


def draw_stratified(seed: Array, size: int, k: int) -> Array:
  """Draws one position of every run, int32[k], in ascending order.

  Args:
    seed: uint32[].
    size: number of positions.
    k: number of runs, at most `size`.

  Returns:
    Positions; each one of a run of m is drawn with probability 1 / m, up to
    2^-32.

  Example:
    >>> draw_stratified(jnp.uint32(1), 4, 4).tolist()
    [0, 1, 2, 3]
  """
  short, longer = divmod(size, max(1, k))
  run = lax.iota(jnp.int32, k)
  first = run * short + jnp.minimum(run, longer)
  lengths = stratum_sizes(size, k).astype(jnp.uint32)
  offset = packing.mul_high(core.random_words(seed, (k,)), lengths)
  return first + offset.astype(jnp.int32)
