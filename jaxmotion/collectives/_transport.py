"""Transport of payloads: packs them into words and sends one buffer.

Three invariants hold for everything sent here:

* Only unsigned words travel. Backends widen narrow floats on the wire (XLA:CPU
  sends bfloat16 as float32, and float8 as float16); they never widen words. So
  the bytes a codec promises are the bytes that are sent.
* The payloads of all arrays form one buffer, sent by one collective. A
  collective costs round trips however little it moves. Only large payloads
  (8 MiB and more) are sent as two buffers. The first half is then on the link
  while the second is still being computed. A step of several programs sends
  more pieces (`hosts.Sending`). An odd number of CPU workers sends large rows
  one after the other.
* Every worker decodes the same words, its own included, so all hold the same
  bits and the result may be typed as replicated.

The layout of the code follows measurements on XLA:CPU. Payloads are
concatenated, never the floats they encode. Received rows are stacked last. The
gather and the swap of two workers are sums of words. Each place says why.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core, hosts
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike

# Between two workers, arrays of fewer elements are joined and summed together.
MIN_ELEMENTS_ALONE = 1 << 16
# Smaller payloads are sent in one piece: a second collective would cost more
# round trips than it hides.
_MIN_SPLIT_BYTES = 1 << 23
# Between two hosts a sum of fewer bytes takes longer than a gather: it has
# twice as many messages.
_MAX_GATHER_BYTES = 1 << 18
# What each of two workers sends to the other.
_SWAP = ((0, 1), (1, 0))
# Fewer words are computed where they are joined.
_MIN_APART = 1 << 12
# Of three hosts, fewer bytes of a host are exchanged faster by an all-to-all.
_MIN_TURNS_BYTES = 3 << 20


def sum_payloads(
  payloads: list[PyTree], axis_name: AxisName, sending: hosts.Sending
) -> list[PyTree]:
  """Adds payloads up over workers, joined where the result stays the same."""
  # Floats are added. Unsigned words (the seed of a shared random sample) are
  # equal on all workers, so they stay as they are. Empty arrays are not sent.
  # A sum is a sum of floats, so its bits depend on the order of its terms. That
  # order must not depend on what else is exchanged in the step. Arrays may be
  # joined into one operand only between two workers, where addition commutes.
  leaves, treedef = jax.tree.flatten(core.to_varying(payloads, axis_name))
  alone: list[int] = []
  joined: dict[Any, list[int]] = {}
  is_pair = core.axis_size(axis_name) == 2
  for i, leaf in enumerate(leaves):
    if not leaf.size or not jnp.issubdtype(leaf.dtype, jnp.floating):
      leaves[i] = core.assert_replicated(leaf, axis_name)
    elif is_pair and leaf.size < MIN_ELEMENTS_ALONE:
      joined.setdefault(leaf.dtype, []).append(i)
    else:
      alone.append(i)
  # Each operand of an all-reduce costs round trips of its own on gloo, so small
  # ones are joined. Between more than two workers the order of a sum depends on
  # the position in the operand.
  buffers = [join_flat(leaves, members) for members in joined.values()]

  def add(arrays: Sequence[Array]) -> list[Array]:
    return [lax.psum(a, axis_name) for a in arrays]

  late, early = _split_in_halves([leaves[i] for i in alone])
  if sending.has_pieces:
    # The last array first, and small ones, of all layers, in the end.
    sums = add([leaves[i] for i in alone[::-1]])
    totals = [*sums[::-1], *add(buffers)]
  elif late:
    late_totals, early_totals, _ = _send_early_first(
      add, [*late, *buffers], early
    )
    split = len(late)
    totals = [*late_totals[:split], *early_totals, *late_totals[split:]]
  else:
    totals = add([*early, *buffers])
  for i, total in zip(alone, totals, strict=False):
    leaves[i] = total
  for members, total in zip(joined.values(), totals[len(alone) :], strict=True):
    split_flat(leaves, members, total)
  return jax.tree.unflatten(treedef, leaves)


def join_flat(leaves: Sequence[Array], members: Sequence[int]) -> Array:
  """Returns some of the leaves, which have one dtype, as one flat array."""
  return jnp.concatenate([leaves[i].reshape(-1) for i in members])


def split_flat(
  leaves: list[Array], members: Sequence[int], joined: Array
) -> None:
  """Puts the pieces of an array of `join_flat` back into a list of leaves."""
  start = 0
  for i in members:
    shape, size = leaves[i].shape, leaves[i].size
    leaves[i] = joined[start : start + size].reshape(shape)
    start += size


def scatter_payloads(
  payloads: list[PyTree], axis_name: AxisName, sending: hosts.Sending
) -> list[PyTree]:
  """Sums rows of summable payloads over workers; each keeps its own row."""
  # Payloads are large, and each is sent by itself whatever `sending` says.
  index = core.worker_index(axis_name)

  def scatter_leaf(a: Array) -> Array:
    if jnp.issubdtype(a.dtype, jnp.floating):
      return lax.psum_scatter(a, axis_name, scatter_dimension=0, tiled=False)
    return lax.dynamic_index_in_dim(a, index, 0, keepdims=False)

  return jax.tree.map(scatter_leaf, payloads)


def gather_payloads(
  payloads: list[PyTree],
  axis_name: AxisName,
  sending: hosts.Sending = hosts.AT_ONCE,
) -> list[PyTree]:
  """Returns every worker's payloads: each leaf gains a leading worker axis."""
  # payloads: in the order of the tree.
  rows = jax.tree.map(lambda a: a[None], core.to_varying(payloads, axis_name))
  split = sending.split_in_pieces if sending.has_pieces else _split_in_halves
  halves = [half for half in split(rows) if jax.tree.leaves(half)]
  buffers = [_pack_words(half)[0] for half in halves]
  if sending.has_pieces:
    received = [
      _gather_words([own], axis_name, sending)[0] for own in buffers[::-1]
    ]
    received.reverse()
  else:
    received = list(_gather_words(buffers, axis_name, sending))
  gathered = [
    payload
    for half, words in zip(halves, received, strict=True)
    for payload in _unpack_words(words, half)
  ]
  return gathered if gathered else payloads


def _gather_words(
  buffers: Sequence[Array], axis_name: AxisName, sending: hosts.Sending
) -> Sequence[tuple[Array, ...]]:
  """Returns every worker's buffers, one tuple of rows for each buffer."""

  def all_gather(*buffers: Array) -> tuple[tuple[Array, ...], ...]:
    return tuple(
      tuple(core.gather_replicated(own, axis_name)) for own in buffers
    )

  nbytes = core.tree_bytes(buffers)
  by_swap = nbytes <= sending.swap_bytes
  if nbytes <= _MAX_GATHER_BYTES and not by_swap:
    return all_gather(*buffers)
  options = dict(by_swap=by_swap, has_pieces=sending.has_pieces)
  gather_pair = functools.partial(_gather_pair, axis_name=axis_name, **options)
  return _send_by_platform(all_gather, gather_pair, buffers, axis_name)


def exchange_rows(
  payloads: list[PyTree], axis_name: AxisName, sending: hosts.Sending
) -> list[PyTree]:
  """Sends row r of every leaf to worker r; returns the rows it received."""
  # `payloads`: leaves of shape (workers, ...).
  rows = core.to_varying(payloads, axis_name)
  if not jax.tree.leaves(rows):
    return rows
  if sending.has_pieces:
    pieces = sending.split_in_pieces(rows)
    received = [_exchange_words(piece, axis_name) for piece in pieces[::-1]]
    return [payload for piece in received[::-1] for payload in piece]
  return _exchange_words(rows, axis_name)


def _exchange_words(rows: PyTree, axis_name: AxisName) -> PyTree:
  """Sends row r of every leaf to worker r, in one buffer."""
  words = _pack_words(rows)
  in_turns = functools.partial(_exchange_in_turns, axis_name=axis_name)
  by_sum = functools.partial(_swap_by_sum, axis_name=axis_name)

  def all_to_all(words: Array) -> tuple[Array, ...]:
    return tuple(lax.all_to_all(words, axis_name, 0, 0, tiled=True))

  is_large = core.tree_bytes(words) >= _MIN_TURNS_BYTES
  if is_large and len(words) % 2:
    received = lax.platform_dependent(words, cpu=in_turns, default=all_to_all)
  else:
    received = _send_by_platform(all_to_all, by_sum, [words], axis_name)
  return _unpack_words(received, rows)


def permute_payload(
  payload: PyTree, axis_name: AxisName, pairs: Sequence[tuple[int, int]]
) -> PyTree:
  """Sends a payload from the first worker of each pair to the second one."""
  # All its leaves travel in one buffer of words.
  rows = jax.tree.map(lambda a: a[None], core.to_varying(payload, axis_name))
  if not jax.tree.leaves(rows):
    return payload
  received = lax.ppermute(_pack_words(rows), axis_name, pairs)
  return jax.tree.map(lambda a: a[0], _unpack_words(tuple(received), rows))


def _split_in_halves(
  payloads: list[PyTree],
) -> tuple[list[PyTree], list[PyTree]]:
  """Splits large payloads into two halves that are sent one by one."""
  # The backward pass computes gradients from the last array to the first. So
  # the second half can be on the link while the first is still being computed.
  # Returns the first half, which is computed late and may be empty, and the
  # second, which is computed early.
  sizes = [core.tree_bytes(p) for p in payloads]
  if sum(sizes) < _MIN_SPLIT_BYTES:
    return [], payloads
  gaps = [abs(sum(sizes[:i]) - sum(sizes[i:])) for i in range(len(sizes))]
  middle = gaps.index(min(gaps))
  return payloads[:middle], payloads[middle:]


def _send_early_first(
  send: Callable[[Sequence[Array]], Sequence[Array]],
  late: Sequence[Array],
  early: Sequence[Array],
) -> tuple[Sequence[Array], Sequence[Array], Sequence[Array]]:
  """Sends the halves of `_split_in_halves`, each once it is computed."""
  # Without the order, XLA:CPU would join both into one collective, which starts
  # when the last gradient is there: nothing would overlap.
  # Returns the sums of `late`, the sums of `early`, and `late` as it was sent.
  early_sums = send(early)
  late = [hosts.schedule_after(a, early_sums[-1]) for a in late]
  # The update that reads a sum may write where a parameter was, so it must not
  # start before all gradients are computed: XLA:CPU would copy the parameter.
  early_sums = [hosts.schedule_after(a, late[-1]) for a in early_sums]
  return send(late), early_sums, late


def _send_by_platform(
  send: Callable[..., Any],
  send_by_sum: Callable[..., Any],
  buffers: Sequence[Array],
  axis_name: AxisName,
) -> Any:
  """Sends buffers of words: between two CPU workers, by way of their sum."""
  if core.axis_size(axis_name) != 2:
    return send(*buffers)
  return lax.platform_dependent(*buffers, cpu=send_by_sum, default=send)


def _gather_pair(
  *buffers: Array, axis_name: AxisName, by_swap: bool, has_pieces: bool
) -> tuple[tuple[Array, ...], ...]:
  """Gathers between two workers by a sum of their words, or by a swap."""
  # Unsigned words wrap around, so the sum less a worker's own words is the
  # other worker's words, bit for bit. The bytes are those of a gather. But gloo
  # sums in both directions at once (0.95 of the link at 16 MiB) and gathers in
  # one after the other (0.63). It takes two round trips for a sum, and one for
  # a swap. Both are the same whatever the order of the workers, which a gather
  # is not.
  rank = lax.axis_index(axis_name)

  def send_one(own: Array) -> Array:
    if by_swap:
      return lax.ppermute(own, axis_name, _SWAP)
    return lax.psum(own, axis_name)

  def send(buffers: Sequence[Array]) -> list[Array]:
    return [send_one(own) for own in buffers[::-1]][::-1]

  def select_rows(rows: tuple[Array, Array], _: Any) -> tuple[Array, Array]:
    own, received = rows
    return _order_rows(rank, own, received if by_swap else received - own)

  if len(buffers) == 2 and not has_pieces:
    late, early, sent = _send_early_first(send, buffers[:1], buffers[1:])
    received, buffers = [*late, *early], (*sent, *buffers[1:])
  else:
    received = send(buffers)
  pairs = [
    (own, core.to_varying(words, axis_name))
    for own, words in zip(buffers, received, strict=True)
  ]
  if has_pieces:
    # The program that sends ends with the selection.
    rows = [hosts.mark_received(select_rows(pair, ())) for pair in pairs]
  else:
    # `update_in_place` keeps the selection out of the decode. Fused into it,
    # the selection would be made once an element and without vectors (5x).
    rows = [
      hosts.update_in_place(select_rows, pair, (), rank) for pair in pairs
    ]
  return tuple(core.assert_replicated(pair, axis_name) for pair in rows)


def _order_rows(rank: Array, own: Array, other: Array) -> tuple[Array, Array]:
  """Returns a worker's own row and that of the other of two, by rank."""
  return jnp.where(rank == 0, own, other), jnp.where(rank == 0, other, own)


def _swap_by_sum(words: Array, axis_name: AxisName) -> tuple[Array, ...]:
  """Sends row r to worker r of two, by way of the sum of what both send."""
  # The bytes are those of an all-to-all; see `_gather_pair`.
  rank = lax.axis_index(axis_name)

  def select_rows(rows: tuple[Array, Array], _: Any) -> tuple[Array, Array]:
    return _order_rows(rank, *rows)

  rows = words[0], words[1]
  kept, sent = hosts.update_in_place(select_rows, rows, (), rank)
  other = core.to_varying(lax.psum(sent, axis_name), axis_name) - sent
  return hosts.update_in_place(select_rows, (kept, other), (), rank)


def _exchange_in_turns(words: Array, axis_name: AxisName) -> tuple[Array, ...]:
  """Sends row r to worker r of an odd number of workers, row by row."""
  # In a turn a worker sends to one worker and receives from another. In gloo's
  # all-to-all two hosts send to each other, one after the other: 0.6 of the
  # link at 16 MiB, turns 0.85. An even number of workers has such a turn, too.
  workers = words.shape[0]
  rank = lax.axis_index(axis_name)

  def take(rows: Array, number: Array) -> Array:
    return lax.dynamic_index_in_dim(
      rows, lax.rem(number, jnp.int32(workers)), keepdims=False
    )

  received = [take(words, rank)]
  for turn in range(1, workers):
    # Turns at once would share the link again.
    sent = hosts.schedule_after(take(words, rank + turn), received[-1])
    pairs = [(i, (i + turn) % workers) for i in range(workers)]
    received.append(lax.ppermute(sent, axis_name, pairs))
  # Turn t brought the row of the worker t places before.
  by_turn = jnp.stack(received)
  return tuple(take(by_turn, rank + workers - r) for r in range(workers))


def _pack_words(payload: PyTree) -> Array:
  """Packs leaves of shape (rows, ...) into one buffer of words (rows, n)."""
  leaves = jax.tree.leaves(payload)
  width = _common_width(leaves)
  if len(leaves) == 1:
    return _to_words(leaves[0], width)

  def to_words(leaf: Array) -> Array:
    if leaf.size < _MIN_APART:
      return _to_words(leaf, width)
    # XLA:CPU would compute codes where they are joined, element by element (4
    # bits: 6x).
    return hosts.write_apart(lambda leaf: _to_words(leaf, width), leaf)

  # Payloads are concatenated, never the floats they encode, for the same
  # reason.
  return jnp.concatenate([to_words(leaf) for leaf in leaves], axis=1)


def _unpack_words(received: Sequence[Array], payload: PyTree) -> PyTree:
  """Unpacks rows of words to leaves like those that `_pack_words` packed."""
  leaves, treedef = jax.tree.flatten(payload)
  width = received[0].dtype.itemsize

  def unpack(
    received: Sequence[Array], start: Any, like: ShapedLike, size: int
  ) -> Array:
    rows = [hosts.slice_at(r, start, size) for r in received]
    # The rows are stacked last: then a decode of one row reads that row's
    # buffer itself. Otherwise XLA:CPU would choose the buffer once an element.
    return jnp.stack([_from_words(r, like) for r in rows])

  sizes = []
  for leaf in leaves:
    like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    words = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize // width
    sizes.append((like, words))
  unpacked = hosts.take_apart(unpack, sizes, tuple(received))
  return jax.tree.unflatten(treedef, unpacked)


def _common_width(leaves: list[Array]) -> int:
  """Returns the bytes of the words that leaves (rows, ...) travel in."""
  # It is the width that most of the bytes have already, so most leaves need no
  # conversion. If a leaf does not fill a whole number of such words, narrower
  # words are used.
  bytes_of: dict[int, int] = {}
  for leaf in leaves:
    width = leaf.dtype.itemsize
    bytes_of[width] = bytes_of.get(width, 0) + leaf.size * width
  widest = max(bytes_of, key=lambda w: (bytes_of[w], w))
  sizes = [math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves]
  return math.gcd(widest, *sizes)


def _to_words(x: Array, width: int) -> Array:
  """Bitcasts (rows, ...) to words of `width` bytes, (rows, n)."""
  own = x.dtype.itemsize
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  elif x.dtype != core.word_dtype(x.dtype):
    x = core.to_bits(x)
  x = x.reshape(x.shape[0], -1)
  if own < width:
    x = x.reshape(x.shape[0], -1, width // own)
  if own != width:
    x = lax.bitcast_convert_type(x, f"uint{8 * width}")
  return x.reshape(x.shape[0], -1)


def _from_words(words: Array, like: ShapedLike) -> Array:
  """Inverts `_to_words` for one row of `like`: words (n,) to (...)."""
  shape, dtype = like.shape[1:], like.dtype
  own, width = dtype.itemsize, words.dtype.itemsize
  if own > width:
    words = words.reshape(-1, own // width)
  if own != width:
    words = lax.bitcast_convert_type(words, core.word_dtype(dtype)).reshape(-1)
  x = words.reshape(shape)
  if dtype == jnp.bool_:
    return x.astype(dtype)
  return x if x.dtype == dtype else core.from_bits(x, dtype)
