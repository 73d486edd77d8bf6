"""What an exchange of gradients takes, for any codec and number of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmotion.codecs import Codec, identity, partition
from jaxmotion.core import Like, PyTree, check_choice
from jaxmotion.perfmodel._codec_time import decode_seconds, encode_seconds
from jaxmotion.perfmodel._collectives import ledger_seconds
from jaxmotion.perfmodel._platform import Axis, Device, Platform
from jaxmotion.wire import Ledger, Move

# As `jaxmotion.collectives` has them; the tests hold the bytes equal.
_LEAST_SHARD = 64
_MOST_JOINED = 1 << 16


class Exchange(NamedTuple):
  """The time of one exchange, phase by phase.

  Args:
    ledger: what each worker sends.
    encode_s: before anything is sent.
    link_s: of all collectives.
    recode_s: decoding, summing and encoding between two phases.
    decode_s: decoding and summing what has arrived.
    memory_bytes: of payloads, sent and received, and of the codec's memory.

  Example:
    >>> Exchange(Ledger(), 1e-3, 2e-3, 0.0, 5e-4, 1000).total_s
    0.0035
  """

  ledger: Ledger
  encode_s: float
  link_s: float
  recode_s: float
  decode_s: float
  memory_bytes: int

  @property
  def total_s(self) -> float:
    """Seconds of all phases, one after the other."""
    return math.fsum((self.encode_s, self.link_s, self.recode_s, self.decode_s))


class Job(NamedTuple):
  """An array that is exchanged.

  Attributes:
    codec: encodes it.
    like: what is encoded, of one host's part if its devices reduce first.
    method: "sum", "gather" or "two_phase".
    leaves: positions of the leaves it is made of.
    whole: those leaves, as the devices of a host have them.
  """

  codec: Codec
  like: jax.ShapeDtypeStruct
  method: str
  leaves: tuple[int, ...]
  whole: tuple[Like, ...]


def exchange_ledger(
  codec: Codec | None,
  tree: PyTree,
  axis: Axis,
  *,
  method: str | None = None,
  within: Axis | None = None,
) -> Ledger:
  """Counts what an exchange sends, for any number of workers.

  Exactly what `jaxmotion.wire.step_bytes` counts in the traced exchange.

  Args:
    codec: encodes what travels; None is full precision.
    tree: gradients: pytree of arrays or ShapeDtypeStructs.
    axis: the workers, or the hosts.
    method: "gather" or "two_phase"; None chooses as the exchange does. Codecs
      whose payloads can be added are summed; small arrays are gathered.
    within: the devices of one host, which first reduce among themselves at
      full precision.

  Returns:
    The ledger.

  Raises:
    ValueError: an unknown method.
    TypeError: a leaf that is not floating-point.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import shipped
    >>> data = shipped("ethernet_1gbit").resize(data=65536).axis("data")
    >>> grads = jax.ShapeDtypeStruct((8192, 8192), "float32")
    >>> plain = exchange_ledger(None, grads, data)
    >>> small = exchange_ledger(codecs.sign(), grads, data)
    >>> round(plain.total_bytes / small.total_bytes)
    31
  """
  return make_plan(codec, tree, axis, method, within).ledger


def predict_exchange(
  codec: Codec | None,
  tree: PyTree,
  platform: Platform,
  axis: str,
  *,
  method: str | None = None,
  within: str | None = None,
  algorithm: str = "ring",
) -> Exchange:
  """Predicts the mean of a tree over workers, as `jaxmotion.exchange` does it.

  With `N` workers, an array of `n` values and its payload of `P(n)` bytes, a
  worker sends and computes

  =========  ==========================  ==================================
  method     bytes                       codec
  =========  ==========================  ==================================
  sum        `2 (N-1)/N P(n)`            encode n, decode n
  gather     `(N-1) P(n)`                encode n, decode and add N n
  two_phase  `2 (N-1) P(n / N)`          encode n + n/N, decode 2 n
  =========  ==========================  ==================================

  Args:
    codec: encodes what travels; None is full precision.
    tree: gradients: pytree of arrays or ShapeDtypeStructs.
    platform: devices and links.
    axis: the axis of the workers, or that of the hosts.
    method: as for `exchange_ledger`.
    within: the axis of the devices of one host, if they reduce first.
    algorithm: of the collectives, as for `traffic`.

  Returns:
    The exchange.

  Raises:
    ValueError: an axis that the platform has not, an unknown method.
    TypeError: a leaf that is not floating-point.

  Example:
    >>> from jaxmotion import codecs
    >>> from jaxmotion.perfmodel import shipped
    >>> cluster = shipped("ethernet_1gbit")
    >>> grads = jax.ShapeDtypeStruct((2048, 2048), "float32")
    >>> plain = predict_exchange(None, grads, cluster, "data")
    >>> small = predict_exchange(codecs.sign(), grads, cluster, "data")
    >>> small.total_s < plain.total_s / 10
    True
  """
  workers = platform.axis(axis)
  devices = None if within is None else platform.axis(within)
  plan = make_plan(codec, tree, workers, method, devices)
  return plan.predict(platform, algorithm)


class Plan(NamedTuple):
  """How a tree is exchanged.

  Attributes:
    jobs: its arrays, in the order of the tree.
    axis: the workers, or the hosts.
    within: the devices of one host, if they reduce first.
  """

  jobs: tuple[Job, ...]
  axis: Axis
  within: Axis | None

  @property
  def ledger(self) -> Ledger:
    """What each worker sends."""
    moves = _moves(self.jobs, self.axis)
    if self.within is None:
      return Ledger(tuple(moves))
    leaves = [leaf for job in self.jobs for leaf in job.whole]
    before, after = _moves_within(leaves, self.within)
    return Ledger((*before, *moves, *after))

  def predict(self, platform: Platform, algorithm: str) -> Exchange:
    """The time and memory of exchanging all jobs at once."""
    workers = self.axis.workers
    phases = [_codec_seconds(j, workers, platform.device) for j in self.jobs]
    encode, recode, decode = (math.fsum(p[i] for p in phases) for i in range(3))
    link = ledger_seconds(self.ledger, platform, algorithm=algorithm)
    memory = sum(_memory_bytes(job, workers) for job in self.jobs)
    return Exchange(self.ledger, encode, link, recode, decode, memory)


def make_plan(
  codec: Codec | None,
  tree: PyTree,
  axis: Axis,
  method: str | None,
  within: Axis | None,
) -> Plan:
  """Returns the arrays that are exchanged, each with its codec and method."""
  check_choice("method", method, (None, "gather", "two_phase"))
  leaves = jax.tree.leaves(tree)
  if within is not None:
    devices = within.workers
    tree = jax.tree.map(lambda a: _shard(a, devices), tree)
  cut = partition(identity() if codec is None else codec, tree)
  all_sum = all(part.codec.summable for part in cut.parts)
  jobs = []
  for part, like in zip(cut.parts, cut.likes(), strict=True):
    if not part.codec.keeps_dtype:
      wide = jnp.promote_types(like.dtype, jnp.float32)
      like = jax.ShapeDtypeStruct(like.shape, wide)
    chosen = _method(part.codec, like.size, axis.workers, method, all_sum)
    whole = tuple(leaves[i] for i in part.leaves)
    jobs.append(Job(part.codec, like, chosen, part.leaves, whole))
  return Plan(tuple(jobs), axis, within)


def _method(
  codec: Codec, size: int, workers: int, method: str | None, all_sum: bool
) -> str:
  if codec.summable:
    joins = workers == 2 and not all_sum and size <= _MOST_JOINED
    return "gather" if joins else "sum"
  if size < _LEAST_SHARD * workers:
    return "gather"
  return method or ("gather" if workers <= 2 else "two_phase")


def _codec_seconds(
  job: Job, workers: int, device: Device
) -> tuple[float, float, float]:
  """Seconds before, between and after the collectives."""
  codec, n = job.codec, job.like.size
  encode = encode_seconds(codec, n, device)
  if job.method == "sum":
    return encode, 0.0, decode_seconds(codec, n, 1, device)
  if job.method == "gather":
    return encode, 0.0, decode_seconds(codec, n, workers, device)
  row = _row(job.like, workers).size
  recode = decode_seconds(codec, row, workers, device)
  recode += encode_seconds(codec, row, device)
  return encode, recode, decode_seconds(codec, n, 1, device)


def _memory_bytes(job: Job, workers: int) -> int:
  codec, like, method, *_ = job
  if method != "two_phase":
    received = workers if method == "gather" else 0
    payload = _nbytes(codec.payload_like(like))
    return _state_bytes(codec, like) + (1 + received) * payload
  # Rows that are sent, that are received, and those of the mean.
  row = _row(like, workers)
  rows = 3 * workers * _nbytes(codec.payload_like(row))
  return (workers + 1) * _state_bytes(codec, row) + rows


def _state_bytes(codec: Codec, like: Like) -> int:
  return _nbytes(jax.eval_shape(codec.init, like))


def _moves(jobs: Sequence[Job], axis: Axis) -> list[Move]:
  """What a worker sends: sums, rows of the first phase, a gather."""

  def move(op: str, dtype: str, nbytes: int) -> Move:
    return Move(op, (axis.name,), axis.workers, dtype, nbytes, 1)

  sums: dict[str, int] = {}
  rows = gathered = 0
  for codec, like, method, *_ in jobs:
    if method == "sum":
      for leaf in jax.tree.leaves(codec.payload_like(like)):
        # Words of summable payloads are the same everywhere: they stay.
        if jnp.issubdtype(leaf.dtype, jnp.floating):
          name = str(leaf.dtype)
          sums[name] = sums.get(name, 0) + _nbytes(leaf)
    elif method == "gather":
      gathered += _nbytes(codec.payload_like(like))
    else:
      row = _nbytes(codec.payload_like(_row(like, axis.workers)))
      rows += axis.workers * row
      gathered += row
  moves = [move("all_reduce", name, n) for name, n in sums.items()]
  if rows:
    moves.append(move("all_to_all", "words", rows))
  if gathered:
    moves.append(move("all_gather", "words", gathered))
  return moves


def _moves_within(
  likes: list[Like], axis: Axis
) -> tuple[list[Move], list[Move]]:
  """What the devices of a host send each other, before and after."""

  def move(op: str, nbytes: int) -> Move:
    return Move(op, (axis.name,), axis.workers, "float", nbytes, 1)

  def wide_bytes(like: Like) -> int:
    dtype = jnp.promote_types(like.dtype, jnp.float32)
    return math.prod(like.shape) * dtype.itemsize

  rows = [_row(a, axis.workers) for a in likes if _is_cut(a, axis.workers)]
  whole = [a for a in likes if not _is_cut(a, axis.workers)]
  before = [("reduce_scatter", axis.workers * sum(map(wide_bytes, rows)))]
  before.append(("all_reduce", sum(map(wide_bytes, whole))))
  # Of what was not cut, all take what the first device has.
  after = [("all_gather", _nbytes(rows)), ("all_reduce", _nbytes(whole))]
  return [move(*m) for m in before if m[1]], [move(*m) for m in after if m[1]]


def _is_cut(like: Like, devices: int) -> bool:
  return math.prod(like.shape) >= _LEAST_SHARD * devices


def _shard(like: Like, devices: int) -> jax.ShapeDtypeStruct:
  if _is_cut(like, devices):
    return _row(like, devices)
  return jax.ShapeDtypeStruct(like.shape, like.dtype)


def _row(like: Like, workers: int) -> jax.ShapeDtypeStruct:
  """The shard of an array that one worker reduces: rows where they divide."""
  size, minor = math.prod(like.shape), like.shape[-1] if like.shape else 1
  shape: tuple[int, ...] = (math.ceil(size / workers),)
  if len(like.shape) > 1 and minor and size // minor % workers == 0:
    shape = (size // minor // workers, minor)
  return jax.ShapeDtypeStruct(shape, like.dtype)


def _nbytes(tree: PyTree) -> int:
  leaves = jax.tree.leaves(tree)
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in leaves)
