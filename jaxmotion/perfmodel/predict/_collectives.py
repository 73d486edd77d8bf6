"""Predicts the messages, bytes and seconds of collectives.

Public functions check their arguments. `move_seconds` does not: the planner
calls it thousands of times for one plan, and the checks took longer than the
arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxmotion import core
from jaxmotion.perfmodel.platform import Axis, Link, Platform, find_axis
from jaxmotion.perfmodel.predict import _checks
from jaxmotion.wire import Ledger, Move

ALGORITHMS = ("ring", "halving_doubling", "tree")


class CollectiveTraffic(NamedTuple):
  """Messages and bytes of the busiest worker in one collective.

  Args:
    hops: number of messages that have to wait for one another.
    wire_bytes: bytes that the worker sends, or that its successor waits for.
    is_two_way: whether the worker sends and receives at the same time.

  Example:
    >>> collective_traffic("all_reduce", 1e6, 4)
    CollectiveTraffic(hops=6, wire_bytes=1500000.0, is_two_way=True)
  """

  hops: int
  wire_bytes: float
  is_two_way: bool


def collective_traffic(
  op: str, payload_bytes: float, workers: int, *, algorithm: str = "ring"
) -> CollectiveTraffic:
  r"""Returns the messages and bytes of a collective.

  With `N` workers, `P` payload bytes on each, and `b = ceil(log2 N)`:

  ==================  ================  =============  ===============
  op                  algorithm         hops           bytes
  ==================  ================  =============  ===============
  all_reduce          ring              `2 (N - 1)`    `2 (N-1)/N P`
  all_reduce          halving_doubling  `2 b`          `2 (N-1)/N P`
  all_reduce          tree              `2 b`          `2 b P`
  reduce_scatter      ring              `N - 1`        `(N-1)/N P`
  reduce_scatter      halving_doubling  `b`            `(N-1)/N P`
  all_gather          ring              `N - 1`        `(N-1) P`
  all_gather          halving_doubling  `b`            `(N-1) P`
  all_to_all          ring              `N - 1`        `(N-1)/N P`
  collective_permute  ring              `1`            `P`
  broadcast           ring              `b + N - 1`    `2 (N-1)/N P`
  broadcast           tree              `b`            `b P`
  ==================  ================  =============  ===============

  The bytes of "ring" are those of `wire.Move`. An all-to-all sends to each
  other worker in turn. A broadcast over the ring scatters, then gathers.

  Args:
    op: name of the collective.
    payload_bytes: bytes of the operand on one worker, `P`.
    workers: number of workers, `N`.
    algorithm: "ring", "halving_doubling" (for powers of two of workers) or
      "tree" (binomial).

  Returns:
    The traffic; one worker alone has none.

  Raises:
    TypeError: `workers` is not an integer, or `payload_bytes` not a number.
    ValueError: the collective is unknown, has no such algorithm, or the
      algorithm cannot serve that number of workers.

  Example:
    >>> traffic = collective_traffic(
    ...   "all_reduce", 1e6, 8, algorithm="halving_doubling"
    ... )
    >>> traffic.hops
    6

  References:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication
    operations in MPICH, 2005.
  """
  _check_collective(op, payload_bytes, workers, algorithm)
  return _count_traffic(op, payload_bytes, workers, algorithm)


def _check_collective(
  op: str, payload_bytes: float, workers: int, algorithm: str
) -> None:
  core.check_int("workers", workers, 1)
  core.check_number("payload_bytes", payload_bytes, 0)
  core.check_choice("op", op, list(dict.fromkeys(op for op, _ in _TRAFFIC)))
  choices = [name for name in ALGORITHMS if (op, name) in _TRAFFIC]
  core.check_choice("algorithm", algorithm, choices)
  if algorithm == "halving_doubling" and workers & (workers - 1):
    raise ValueError(
      f"`workers` must be a power of two for 'halving_doubling', got {workers}."
    )


def _count_traffic(
  op: str, payload_bytes: float, workers: int, algorithm: str
) -> CollectiveTraffic:
  """Returns `collective_traffic` of checked arguments."""
  if workers == 1:
    return CollectiveTraffic(0, 0.0, False)
  hops, share = _TRAFFIC[op, algorithm](workers, (workers - 1).bit_length())
  return CollectiveTraffic(hops, share * payload_bytes, algorithm != "tree")


# Hops, and bytes for each byte of payload, of N workers with b = ceil(log2 N).
_TRAFFIC: dict[tuple[str, str], Callable[[int, int], tuple[int, float]]] = {
  ("all_reduce", "ring"): lambda n, b: (2 * (n - 1), 2 * ((n - 1) / n)),
  ("all_reduce", "halving_doubling"): lambda n, b: (2 * b, 2 * ((n - 1) / n)),
  ("all_reduce", "tree"): lambda n, b: (2 * b, 2 * b),
  ("reduce_scatter", "ring"): lambda n, b: (n - 1, (n - 1) / n),
  ("reduce_scatter", "halving_doubling"): lambda n, b: (b, (n - 1) / n),
  ("all_gather", "ring"): lambda n, b: (n - 1, n - 1),
  ("all_gather", "halving_doubling"): lambda n, b: (b, n - 1),
  ("all_to_all", "ring"): lambda n, b: (n - 1, (n - 1) / n),
  ("collective_permute", "ring"): lambda n, b: (1, 1),
  ("broadcast", "ring"): lambda n, b: (b + n - 1, 2 * ((n - 1) / n)),
  ("broadcast", "tree"): lambda n, b: (b, b),
}


def collective_seconds(
  op: str,
  payload_bytes: float,
  workers: int,
  link: Link,
  *,
  algorithm: str = "ring",
) -> float:
  r"""Predicts the seconds of one collective between workers on equal links.

  With the hops `h` and bytes `B` of `collective_traffic`, and latency `a`:

  .. math::
    t = h a + B / R'

  `R'` is the share of the link's rate that the collective reaches
  (`Link.efficiency`), divided by the workers that share the link. A link that
  is not full duplex halves it where workers send and receive at once. Summing
  the received data is assumed to overlap with the transfer. A curve that was
  measured for this collective and number of workers replaces the formula.

  Args:
    op: name of the collective.
    payload_bytes: bytes of the operand on one worker.
    workers: number of workers that take part.
    link: link between neighbors.
    algorithm: "ring", "halving_doubling" or "tree".

  Returns:
    Seconds.

  Raises:
    TypeError: `workers` is not an integer, `payload_bytes` not a number, or
      `link` not a `Link`.
    ValueError: the collective is unknown, has no such algorithm, or the
      algorithm cannot serve that number of workers.

  Example:
    >>> from jaxmotion.perfmodel import Link, gbit_per_s
    >>> link = Link(latency_s=1e-4, rate=gbit_per_s(1))
    >>> collective_seconds("all_reduce", 1e6, 4, link)
    0.0126
  """
  _check_collective(op, payload_bytes, workers, algorithm)
  core.check_instance("link", link, Link, "a Link")
  shared_by = link.shared_by
  return _link_seconds(op, payload_bytes, workers, link, shared_by, algorithm)


def _link_seconds(
  op: str,
  payload_bytes: float,
  workers: int,
  link: Link,
  shared_by: int,
  algorithm: str,
) -> float:
  """Returns `collective_seconds` of checked arguments."""
  # `shared_by` is given apart from the link because a collective over several
  # axes uses each of their links alone.
  curve = link.measured.get(f"{op} {workers}")
  if curve is not None and workers > 1:
    return curve.seconds_at(payload_bytes)
  traffic = _count_traffic(op, payload_bytes, workers, algorithm)
  rate = link.rate.bytes_per_s * link.efficiency.get(op, 1.0) / shared_by
  if traffic.is_two_way and not link.full_duplex:
    rate /= 2
  return traffic.hops * link.latency_s + traffic.wire_bytes / rate


def ledger_seconds(
  ledger: Ledger, platform: Platform, *, algorithm: str = "ring"
) -> float:
  """Predicts the seconds of all collectives of a step, one after the other.

  A move over several axes at once is as slow as the slowest of their links.
  Of the workers that share a link, only one sends over it in such a move,
  unless the move is an all-to-all.

  Args:
    ledger: collectives counted by `jaxmotion.wire.step_bytes` or
      `exchange_ledger`.
    platform: platform with the axes that the moves name.
    algorithm: algorithm of the collectives that have it; all others use the
      ring.

  Returns:
    Seconds.

  Raises:
    TypeError: `ledger` is not a `Ledger`, or `platform` not a `Platform`.
    ValueError: the platform lacks an axis of the ledger, or has another
      number of workers there. Or `algorithm` is unknown.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> move = Move("all_reduce", ("data",), 8, "float32", 10**6, 1)
    >>> cluster = builtin_platform("ethernet_1gbit")
    >>> round(ledger_seconds(Ledger((move,)), cluster), 6)
    0.0147
  """
  _checks.check_ledger(ledger)
  _checks.check_platform(platform)
  check_algorithm(algorithm)
  for move in ledger.moves:
    _check_move(move, platform, algorithm)
  return math.fsum(
    move_seconds(move, platform, algorithm) for move in ledger.moves
  )


def check_algorithm(algorithm: str) -> None:
  """Raises unless some collective has this algorithm."""
  core.check_choice("algorithm", algorithm, ALGORITHMS)


def _check_move(move: Move, platform: Platform, algorithm: str) -> None:
  axes = [find_axis(platform, "ledger", name) for name in move.axes]
  if math.prod(axis.workers for axis in axes) != move.workers:
    sizes = {axis.name: axis.workers for axis in axes}
    raise ValueError(
      f"`platform` must have {move.workers} workers on {move.axes}, as the "
      f"ledger has, got {sizes}: see Platform.resize."
    )
  if move.workers > 1:
    algorithm = _supported_algorithm(move.op, algorithm)
    _check_collective(move.op, move.payload_bytes, move.workers, algorithm)


def _supported_algorithm(op: str, algorithm: str) -> str:
  return algorithm if (op, algorithm) in _TRAFFIC else "ring"


def move_seconds(move: Move, platform: Platform, algorithm: str) -> float:
  """Predicts the seconds of one move of a ledger, without checks.

  Args:
    move: a collective over axes that the platform has, with their numbers of
      workers.
    platform: platform with the axes of the move.
    algorithm: algorithm of the collective; the ring if it has no such one.

  Returns:
    Seconds of all executions of the move.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> move = Move("all_reduce", ("data",), 8, "float32", 10**6, 2)
    >>> cluster = builtin_platform("ethernet_1gbit")
    >>> round(move_seconds(move, cluster, "ring"), 6)
    0.0294
  """
  axes = [platform.axis(name) for name in move.axes]
  links = [axis.link for axis in axes if axis.workers > 1]
  algorithm = _supported_algorithm(move.op, algorithm)
  # In a ring through several axes, one worker of those behind a link sends
  # over it at a time. An all-to-all sends from all of them at once.
  is_shared = len(links) == 1 or move.op == "all_to_all"
  return move.count * max(
    (
      _link_seconds(
        move.op,
        move.payload_bytes,
        move.workers,
        link,
        link.shared_by if is_shared else 1,
        algorithm,
      )
      for link in links
    ),
    default=0.0,
  )


def hierarchical_all_reduce_ledger(
  payload_bytes: int, mesh_axes: Sequence[Axis], *, dtype: str = "float32"
) -> Ledger:
  """Returns the collectives of an all-reduce, one axis after the other.

  A reduce-scatter over the innermost axis leaves each worker with its part of
  the sum. The parts are all-reduced over the other axes, then gathered.

  Args:
    payload_bytes: bytes of the operand on one worker.
    mesh_axes: axes of the mesh, outermost first.
    dtype: name of the element type in the ledger.

  Returns:
    The ledger; `ledger_seconds` predicts how long it takes.

  Raises:
    TypeError: an argument is of another class.
    ValueError: `payload_bytes` is negative, or there is no axis.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> cluster = builtin_platform("h100_cluster")
    >>> ledger = hierarchical_all_reduce_ledger(8000, cluster.axes)
    >>> ledger.per_axis()
    {('device',): 14000.0, ('host',): 1875.0}
    >>> by_axis = hierarchical_all_reduce_ledger(10**9, cluster.axes)
    >>> flat = Move("all_reduce", ("host", "device"), 128, "", 10**9, 1)
    >>> flat_s = ledger_seconds(Ledger((flat,)), cluster)
    >>> ledger_seconds(by_axis, cluster) < flat_s
    True
  """
  core.check_int("payload_bytes", payload_bytes, 0)
  axes = core.check_sequence("mesh_axes", mesh_axes, "Axis objects")
  if not axes:
    raise ValueError("`mesh_axes` must have an axis, got none.")
  for i, axis in enumerate(axes):
    _checks.check_axis(f"mesh_axes[{i}]", axis)
  core.check_text("dtype", dtype)
  *outer, inner = axes

  def inner_move(op: str, nbytes: int) -> Move:
    return Move(op, (inner.name,), inner.workers, dtype, nbytes, 1)

  if not outer:
    return Ledger((inner_move("all_reduce", payload_bytes),))
  part = -(-payload_bytes // inner.workers)
  between = hierarchical_all_reduce_ledger(part, outer, dtype=dtype).moves
  scatter = inner_move("reduce_scatter", payload_bytes)
  gather = inner_move("all_gather", part)
  return Ledger((scatter, *between, gather))
