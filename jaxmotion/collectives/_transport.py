"""Payloads onto the wire: words only, and one collective.

Every array of every payload is turned into unsigned words (backends widen
narrow floats on the wire, never words) and joined into one buffer: a collective
costs round trips however little it moves.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import (
  Array,
  AxisName,
  PyTree,
  assert_replicated,
  axis_size,
  schedule_after,
  to_varying,
  update_in_place,
)

# Less is sent in one piece: a second collective costs its round trips.
_LEAST_HALVED_BYTES = 1 << 23
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def gather(payloads: list[PyTree], axis_name: AxisName) -> list[PyTree]:
  """Returns every worker's payloads: each leaf gains a leading worker axis.

  Args:
    payloads: of several arrays, in the order of the tree.
    axis_name: the workers' axis.
  """
  rows = jax.tree.map(lambda a: a[None], to_varying(payloads, axis_name))
  parts = [part for part in halves(rows) if jax.tree.leaves(part)]
  buffers = [_join(part)[0] for part in parts]

  def all_gather(*buffers: Array) -> tuple[tuple[Array, ...], ...]:
    return tuple(
      tuple(lax.all_gather(own, axis_name, to="invarying")) for own in buffers
    )

  def swap(*buffers: Array) -> tuple[tuple[Array, ...], ...]:
    return _swap(buffers, axis_name)

  if axis_size(axis_name) == 2:
    received = lax.platform_dependent(*buffers, cpu=swap, default=all_gather)
  else:
    received = all_gather(*buffers)
  gathered = [
    payload
    for part, words in zip(parts, received, strict=True)
    for payload in _split(words, part)
  ]
  return gathered if gathered else payloads


def halves(payloads: list[PyTree]) -> tuple[list[PyTree], list[PyTree]]:
  """Cuts payloads in two of about the same bytes, if they are large enough.

  Gradients appear from the last array to the first: the second half can be on
  the link while the first is still being computed.

  Returns:
    The first ones, which may be none, and the others.
  """
  each = [
    sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(p))
    for p in payloads
  ]
  if sum(each) < _LEAST_HALVED_BYTES:
    return [], payloads
  gaps = [abs(sum(each[:i]) - sum(each[i:])) for i in range(len(each))]
  cut = gaps.index(min(gaps))
  return payloads[:cut], payloads[cut:]


def in_turns(
  move: Callable[[Sequence[Array]], Sequence[Array]],
  late: Sequence[Array],
  early: Sequence[Array],
) -> tuple[Sequence[Array], Sequence[Array], Sequence[Array]]:
  """Moves `early`, then `late`, each as soon as it can be.

  Args:
    move: sums arrays over the axis.
    late: arrays, of either half one at least.
    early: arrays that are there first.

  Returns:
    The sums of both, and what became of `late` before it was summed.
  """
  first = move(early)
  late = [schedule_after(a, first[-1]) for a in late]
  # What reads a sum may write where a parameter was, so it must not start
  # before all gradients are there: XLA:CPU would copy the parameter.
  first = [schedule_after(a, late[-1]) for a in first]
  return move(late), first, late


def exchange_rows(payload: PyTree, axis_name: AxisName) -> PyTree:
  """Sends row r of every leaf to worker r; returns the rows it received.

  Args:
    payload: leaves of shape (workers, ...).
    axis_name: the workers' axis.

  Returns:
    Leaves of the same shapes; row r came from worker r.
  """

  rows = to_varying(payload, axis_name)
  if not jax.tree.leaves(rows):
    return rows
  received = lax.all_to_all(_join(rows), axis_name, 0, 0, tiled=True)
  return _split(tuple(received), rows)


def _swap(
  buffers: Sequence[Array], axis_name: AxisName
) -> tuple[tuple[Array, ...], ...]:
  """Gathers between two workers by way of the sum of their words.

  Less its own words, modulo their width, a worker is left with the other's.
  The bytes are those of a gather, but gloo sums in both directions at once
  (0.98 of the link) and gathers in one after the other (0.65).
  """
  rank = lax.axis_index(axis_name)

  def move(buffers: Sequence[Array]) -> list[Array]:
    return [lax.psum(own, axis_name) for own in buffers]

  def place(rows: tuple[Array, Array], _: tuple) -> tuple[Array, Array]:
    own, total = rows
    other = total - own
    return (
      jnp.where(rank == 0, own, other),
      jnp.where(rank == 0, other, own),
    )

  if len(buffers) == 2:
    late, early, sent = in_turns(move, buffers[:1], buffers[1:])
    totals, buffers = [*late, *early], [*sent, *buffers[1:]]
  else:
    totals = move(buffers)
  # Fused into the decode, the choice would be made once a value and without
  # vectors (5x).
  return tuple(
    assert_replicated(
      update_in_place(place, (own, to_varying(total, axis_name)), (), rank),
      axis_name,
    )
    for own, total in zip(buffers, totals, strict=True)
  )


def _join(payload: PyTree) -> Array:
  """Leaves (rows, ...) -> one buffer of words (rows, n)."""
  leaves = jax.tree.leaves(payload)
  width = _common_width(leaves)
  flat = [_to_words(leaf, width) for leaf in leaves]
  # Payloads are joined, never the floats they encode: XLA:CPU would fuse
  # that concatenation into the codec, element by element.
  return flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1)


def _split(received: Sequence[Array], payload: PyTree) -> PyTree:
  """Inverts `_join`: rows of words (n,) -> leaves like those of `payload`."""
  leaves, treedef = jax.tree.flatten(payload)
  width = received[0].dtype.itemsize
  split, start = [], 0
  for leaf in leaves:
    size = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize // width
    rows = [lax.slice_in_dim(r, start, start + size) for r in received]
    # Stacked last: then a decode of one row reads that row's buffer itself,
    # where XLA:CPU would else choose the buffer once a value.
    split.append(jnp.stack([_from_words(r, leaf) for r in rows]))
    start += size
  return jax.tree.unflatten(treedef, split)


def _common_width(leaves: list[Array]) -> int:
  """Bytes of the words that leaves (rows, ...) travel in.

  Those that most of the bytes have, or narrower ones if a leaf fills no whole
  number of them.
  """
  bytes_of: dict[int, int] = {}
  for leaf in leaves:
    width = leaf.dtype.itemsize
    bytes_of[width] = bytes_of.get(width, 0) + leaf.size * width
  most = max(bytes_of, key=lambda w: (bytes_of[w], w))
  each = [math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves]
  return math.gcd(most, *each)


def _to_words(x: Array, width: int) -> Array:
  """(rows, ...) -> words of `width` bytes, (rows, n)."""
  own = x.dtype.itemsize
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  elif x.dtype != _WORDS[own]:
    x = lax.bitcast_convert_type(x, _WORDS[own])
  x = x.reshape(x.shape[0], -1)
  if own < width:
    x = x.reshape(x.shape[0], -1, width // own)
  if own != width:
    x = lax.bitcast_convert_type(x, _WORDS[width])
  return x.reshape(x.shape[0], -1)


def _from_words(words: Array, like: Array) -> Array:
  """Inverts `_to_words` for one row of `like`: words (n,) -> (...)."""
  shape, dtype = like.shape[1:], like.dtype
  own, width = dtype.itemsize, words.dtype.itemsize
  if own > width:
    words = words.reshape(-1, own // width)
  if own != width:
    words = lax.bitcast_convert_type(words, _WORDS[own]).reshape(-1)
  x = words.reshape(shape)
  if dtype == jnp.bool_:
    return x.astype(dtype)
  return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
