"""Predicts the seconds and bytes of one exchange of gradients.

`jaxmotion.collectives` does the exchange; this module derives what it sends
from shapes alone, without a mesh of that many devices. The collectives say what
travels between workers (`plan_messages`, `schedule_rounds`). What the devices
of a host exchange first is written a second time here: tests trace the real
exchange and require the same ledger (tests/perfmodel/test_exchange.py).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core, wire
from jaxmotion.codecs.extend import check_codec, partition
from jaxmotion.collectives import extend as collectives
from jaxmotion.core import PyTree, ShapedLike
from jaxmotion.perfmodel import _collectives, _platform, _roofline

_OPS = {
  "sum": "all_reduce",
  "max": "all_reduce",
  "gather": "all_gather",
  "all_to_all": "all_to_all",
}


class ExchangePrediction(NamedTuple):
  """Predicted seconds, bytes and memory of one exchange, by phase.

  Args:
    ledger: collectives that each worker takes part in, with their bytes.
    encode_s: seconds of encoding before the first collective.
    link_s: seconds of all collectives.
    recode_s: seconds of decoding, summing and encoding between two phases.
    decode_s: seconds of decoding and summing the received payloads.
    memory_bytes: bytes of sent and received payloads and of codec state.

  Example:
    >>> from jaxmotion.wire import Ledger
    >>> ExchangePrediction(Ledger(), 1e-3, 2e-3, 0.0, 5e-4, 1000).total_s
    0.0035
  """

  ledger: wire.Ledger
  encode_s: float
  link_s: float
  recode_s: float
  decode_s: float
  memory_bytes: int

  @property
  def total_s(self) -> float:
    """Seconds of all phases, one after the other."""
    return math.fsum((self.encode_s, self.link_s, self.recode_s, self.decode_s))


def _check_gradients(name: str, value: PyTree) -> PyTree:
  """Returns a tree of floating-point arrays or shapes, or raises."""
  for path, leaf in core.named_leaves(core.typed_arrays(name, value)):
    core.float_array(f"{name}/{path}" if path else name, leaf)
  return value


EXCHANGE_ARGS: dict[str, core.Kind] = {
  "platform": _platform.check_platform,
  "codec": core.optional(functools.partial(check_codec, trees=True)),
  "method": core.choice((None, "gather", "two_phase")),
}


@core.declare(tree=_check_gradients, **EXCHANGE_ARGS)
def exchange_ledger(
  tree: PyTree,
  platform: _platform.Platform,
  mesh_axis: str | core.HostAxes,
  codec: codecs.Codec | None = None,
  *,
  method: str | None = None,
) -> wire.Ledger:
  """Counts the bytes that an exchange sends, for any number of workers.

  The ledger equals that of `jaxmotion.wire.step_bytes` for the traced
  exchange, but needs no mesh of that many devices.

  Args:
    tree: gradients, a pytree of floating-point arrays or ShapeDtypeStructs.
    platform: devices and links; only its axes are read.
    mesh_axis: name of the axis of the workers. With `HostAxes` the devices of a
      host reduce among themselves first, at full precision.
    codec: codec of the payloads; None sends full precision.
    method: "gather" or "two_phase"; None chooses as the exchange does:
      payloads that can be added are summed, small arrays gathered.

  Returns:
    The ledger.

  Raises:
    TypeError: a leaf is not floating-point, or an argument of another class.
    ValueError: the platform has no such axis, or `method` is unknown.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> cluster = builtin_platform("ethernet_1gbit").resize(data=65536)
    >>> grads = jax.ShapeDtypeStruct((8192, 8192), "float32")
    >>> plain = exchange_ledger(grads, cluster, "data")
    >>> sign = exchange_ledger(grads, cluster, "data", codecs.sign())
    >>> round(plain.total_bytes / sign.total_bytes)
    31
  """
  hosts, devices = _platform.named_axes(platform, mesh_axis)
  return make_layout(tree, hosts, codec, method, devices).ledger


@core.declare(
  tree=_check_gradients, algorithm=_collectives.check_algorithm, **EXCHANGE_ARGS
)
def predict_exchange(
  tree: PyTree,
  platform: _platform.Platform,
  mesh_axis: str | core.HostAxes,
  codec: codecs.Codec | None = None,
  *,
  method: str | None = None,
  algorithm: str = "ring",
) -> ExchangePrediction:
  """Predicts one exchange: the mean of a tree over workers.

  The exchange is that of `jaxmotion.exchange`. With `N` workers and an array
  of `n` elements whose payload has `P(n)` bytes, each worker sends and
  computes

  =========  ==========================  ==================================
  method     bytes                       codec
  =========  ==========================  ==================================
  sum        `2 (N-1)/N P(n)`            encode n, decode n
  gather     `(N-1) P(n)`                encode n, decode and add N n
  two_phase  `2 (N-1) P(n / N)`          encode n + n/N, decode 2 n
  rounds     those of its messages       encode n, decode n
  =========  ==========================  ==================================

  The last is the method of codecs that reduce in rounds of their own.

  Args:
    tree: gradients, a pytree of floating-point arrays or ShapeDtypeStructs.
    platform: devices and links.
    mesh_axis: name of the axis of the workers. With `HostAxes` the devices of a
      host reduce among themselves first, at full precision.
    codec: codec of the payloads; None sends full precision.
    method: "gather" or "two_phase"; None chooses as the exchange does.
    algorithm: "ring", "halving_doubling" or "tree", as in
      `collective_traffic`.

  Returns:
    Seconds, bytes and memory of one worker.

  Raises:
    TypeError: a leaf is not floating-point, or an argument of another class.
    ValueError: the platform has no such axis, or `method` or `algorithm` is
      unknown.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> cluster = builtin_platform("ethernet_1gbit")
    >>> grads = jax.ShapeDtypeStruct((2048, 2048), "float32")
    >>> plain = predict_exchange(grads, cluster, "data")
    >>> sign = predict_exchange(grads, cluster, "data", codecs.sign())
    >>> sign.total_s < plain.total_s / 10
    True
  """
  hosts, devices = _platform.named_axes(platform, mesh_axis)
  layout = make_layout(tree, hosts, codec, method, devices)
  return predict_layout(layout, platform, algorithm)


class ExchangedArray(NamedTuple):
  """One array that is exchanged: a leaf, or several leaves packed together."""

  # Of a shard of the array if the devices of a host reduce first.
  plan: collectives.ArrayPlan
  # Positions of its leaves in the tree.
  leaves: tuple[int, ...]
  # Shapes and dtypes of those leaves, before devices of a host cut them.
  whole: tuple[ShapedLike, ...]


class ExchangeLayout(NamedTuple):
  """Arrays and axes of the exchange of a tree, in the order of the tree."""

  arrays: tuple[ExchangedArray, ...]
  # The axis of the hosts, or of the workers.
  hosts: _platform.Axis
  # The axis of the devices of one host, if they reduce first.
  devices: _platform.Axis | None

  @property
  def ledger(self) -> wire.Ledger:
    """Collectives that each worker takes part in, with their bytes."""
    moves = _exchange_moves(self.arrays, self.hosts)
    if self.devices is None:
      return wire.Ledger(tuple(moves))
    leaves = [leaf for array in self.arrays for leaf in array.whole]
    before, after = _local_moves(leaves, self.devices)
    return wire.Ledger((*before, *moves, *after))


def make_layout(
  tree: PyTree,
  hosts: _platform.Axis,
  codec: codecs.Codec | None,
  method: str | None,
  devices: _platform.Axis | None,
) -> ExchangeLayout:
  """Returns the arrays that are exchanged, each with its codec and method."""
  leaves = jax.tree.leaves(tree)
  if devices is not None:
    count = devices.workers
    tree = jax.tree.map(lambda a: collectives.shard_like(a, count), tree)
  split = partition(codecs.identity() if codec is None else codec, tree)
  plans = collectives.plan_arrays(split, hosts.workers, method)
  arrays = [
    ExchangedArray(plan, group.leaves, tuple(leaves[i] for i in group.leaves))
    for group, plan in zip(split.leaf_groups, plans, strict=True)
  ]
  return ExchangeLayout(tuple(arrays), hosts, devices)


def _exchange_moves(
  arrays: Sequence[ExchangedArray], axis: _platform.Axis
) -> list[wire.Move]:
  """Returns the moves between workers, those of one round after another."""
  messages = [collectives.plan_messages(array.plan) for array in arrays]
  left = [iter(own) for own in messages]
  moves = []
  kinds = tuple(tuple(m.kind for m in own) for own in messages)
  for kind, members in collectives.schedule_rounds(kinds):
    payloads = [next(left[i]).payload for i in members]
    for dtype, nbytes in _sent_bytes(kind, payloads).items():
      move = wire.Move(_OPS[kind], (axis.name,), axis.workers, dtype, nbytes, 1)
      moves.append(move)
  return moves


def _sent_bytes(kind: str, payloads: PyTree) -> dict[str, int]:
  """Returns the bytes that travel in one round, by the dtype they travel in."""
  by_dtype: dict[str, int] = {}
  for leaf in jax.tree.leaves(payloads):
    dtype = str(leaf.dtype) if _OPS[kind] == "all_reduce" else "words"
    # Integer words of a sum (seeds, shared positions) are equal on all workers,
    # so they are not sent.
    if kind != "sum" or jnp.issubdtype(leaf.dtype, jnp.floating):
      by_dtype[dtype] = by_dtype.get(dtype, 0) + core.tree_bytes(leaf)
  return {dtype: nbytes for dtype, nbytes in by_dtype.items() if nbytes}


def _local_moves(
  likes: list[ShapedLike], axis: _platform.Axis
) -> tuple[list[wire.Move], list[wire.Move]]:
  """Returns the moves within a host, before and after those between hosts."""

  def list_moves(*sent: tuple[str, int]) -> list[wire.Move]:
    return [
      wire.Move(op, (axis.name,), axis.workers, "float", nbytes, 1)
      for op, nbytes in sent
      if nbytes
    ]

  def wide_bytes(likes: list[ShapedLike]) -> int:
    wide = [jnp.promote_types(a.dtype, jnp.float32).itemsize for a in likes]
    return sum(n * math.prod(a.shape) for n, a in zip(wide, likes, strict=True))

  is_cut = lambda a: collectives.is_sharded(a, axis.workers)
  rows = [collectives.row_like(a, axis.workers) for a in filter(is_cut, likes)]
  whole = [a for a in likes if not is_cut(a)]
  # Every device of a host exchanges the leaves that are too small to cut.
  # Devices may round the same mean differently, so an all-reduce (of zeros
  # on all other devices) gives each of them the first device's result.
  return (
    list_moves(
      ("reduce_scatter", axis.workers * wide_bytes(rows)),
      ("all_reduce", wide_bytes(whole)),
    ),
    list_moves(
      ("all_gather", core.tree_bytes(rows)),
      ("all_reduce", core.tree_bytes(whole)),
    ),
  )


def predict_layout(
  layout: ExchangeLayout, platform: _platform.Platform, algorithm: str
) -> ExchangePrediction:
  """Predicts the exchange of all arrays of a layout at once."""
  plans = [array.plan for array in layout.arrays]
  phases = [_codec_seconds(plan, platform.device) for plan in plans]
  encode_s, recode_s, decode_s = (
    math.fsum(phase[i] for phase in phases) for i in range(3)
  )
  ledger = layout.ledger
  return ExchangePrediction(
    ledger,
    encode_s,
    _collectives.ledger_seconds(ledger, platform, algorithm=algorithm),
    recode_s,
    decode_s,
    sum(map(_memory_bytes, plans)),
  )


def _codec_seconds(
  plan: collectives.ArrayPlan, device: _platform.Device
) -> tuple[float, float, float]:
  """Predicts codec seconds before, between and after the collectives."""
  codec, size, workers = plan.codec, plan.like.size, plan.workers
  encode_s = _roofline.encode_seconds(codec, size, device)
  # Rounds of a codec's own are what it does when it encodes alone.
  if plan.method in ("sum", "rounds"):
    return encode_s, 0.0, _roofline.decode_seconds(codec, size, 1, device)
  if plan.method == "gather":
    return encode_s, 0.0, _roofline.decode_seconds(codec, size, workers, device)
  recode_s = _roofline.decode_seconds(codec, plan.part.size, workers, device)
  recode_s += _roofline.encode_seconds(codec, plan.part.size, device)
  return encode_s, recode_s, _roofline.decode_seconds(codec, size, 1, device)


def _memory_bytes(plan: collectives.ArrayPlan) -> int:
  """Counts the bytes of payloads and codec state that the exchange holds."""
  codec, like, workers = plan.codec, plan.like, plan.workers
  if plan.method == "rounds":
    messages = collectives.plan_messages(plan)
    gathered = [m.payload for m in messages if m.kind == "gather"]
    sent = [m.payload for m in messages]
    # What is sent, and as much that is received; of a gather, every payload.
    held = 2 * core.tree_bytes(sent) + (workers - 1) * core.tree_bytes(gathered)
    return _state_bytes(codec, like) + held
  if plan.method != "two_phase":
    received = workers if plan.method == "gather" else 0
    payload = core.tree_bytes(codec.payload_like(like))
    return _state_bytes(codec, like) + (1 + received) * payload
  # Two phases hold three sets of `workers` parts: those that are sent, those
  # that are received and those of the mean. Codec state is held for the array,
  # or for each row of it, and for the mean of the part that a worker encodes.
  parts = 3 * workers * core.tree_bytes(codec.payload_like(plan.part))
  if plan.encodes_rows:
    return (workers + 1) * _state_bytes(codec, plan.part) + parts
  return _state_bytes(codec, like) + _state_bytes(codec, plan.part) + parts


def _state_bytes(codec: codecs.Codec, like: ShapedLike) -> int:
  return core.tree_bytes(jax.eval_shape(codec.init, like))
