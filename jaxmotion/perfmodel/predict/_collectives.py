"""What a collective takes: messages one after the other, and bytes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxmotion.core import check_choice, check_int
from jaxmotion.perfmodel.platform import Axis, Link, Platform, check_quantity
from jaxmotion.wire import Ledger, Move

ALGORITHMS = ("ring", "halving_doubling", "tree")


class CollectiveTraffic(NamedTuple):
  """What the busiest worker does in one collective.

  Args:
    hops: messages that have to wait for one another.
    wire_bytes: that it sends, or that its successor waits for.
    both_ways: whether it sends and receives at the same time.

  Example:
    >>> collective_traffic("all_reduce", 1e6, 4)
    CollectiveTraffic(hops=6, wire_bytes=1500000.0, both_ways=True)
  """

  hops: int
  wire_bytes: float
  both_ways: bool


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
  other worker in turn; a broadcast over the ring scatters, then gathers.

  Args:
    op: the collective.
    payload_bytes: of the operand on one worker, `P`.
    workers: `N`.
    algorithm: "ring", "halving_doubling" (numbers of workers that are powers
      of two) or "tree" (binomial).

  Returns:
    The traffic; of one worker, none.

  Raises:
    ValueError: an unknown collective, an algorithm that it has not, a number
      of workers that the algorithm cannot do.

  Example:
    >>> doubling = "halving_doubling"
    >>> collective_traffic("all_reduce", 1e6, 8, algorithm=doubling).hops
    6

  References:
    Thakur, Rabenseifner and Gropp, Optimization of collective communication
    operations in MPICH, 2005.
  """
  check_int("workers", workers, 1)
  check_quantity("payload_bytes", payload_bytes, 0.0)
  check_choice("op", op, list(dict.fromkeys(op for op, _ in _SHAPES)))
  choices = [name for name in ALGORITHMS if (op, name) in _SHAPES]
  check_choice("algorithm", algorithm, choices)
  doublings = (workers - 1).bit_length()
  if algorithm == "halving_doubling" and workers != 1 << doublings:
    raise ValueError(
      f"`workers` must be a power of two for 'halving_doubling', got {workers}."
    )
  if workers == 1:
    return CollectiveTraffic(0, 0.0, False)
  hops, share = _SHAPES[op, algorithm](workers, doublings)
  return CollectiveTraffic(hops, share * payload_bytes, algorithm != "tree")


# Hops, and bytes for each byte of payload, of N workers with b = ceil(log2 N).
_SHAPES: dict[tuple[str, str], Callable[[int, int], tuple[int, float]]] = {
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
  r"""Returns the seconds of one collective between workers on equal links.

  With the hops `h` and bytes `B` of `collective_traffic`, latency `a` and
  rate `R`:

  .. math::
    t = h a + B / R'

  where `R'` is the share of `R` that the collective reaches, divided by the
  workers that share the link, and by 2 if they send and receive at once over
  a link that is not full duplex. Adding up what was received is taken to hide
  behind the transfer. Where the link has a curve for that collective and
  number of workers, it takes the place of all this.

  Args:
    op: the collective.
    payload_bytes: of the operand on one worker.
    workers: how many take part.
    link: between neighbours.
    algorithm: as for `collective_traffic`.

  Raises:
    ValueError: as `collective_traffic`.

  Example:
    >>> from jaxmotion.perfmodel import Link, gbit_per_s
    >>> link = Link(latency_s=1e-4, rate=gbit_per_s(1))
    >>> collective_seconds("all_reduce", 1e6, 4, link)
    0.0126
  """
  moved = collective_traffic(op, payload_bytes, workers, algorithm=algorithm)
  curve = link.measured.get(f"{op} {workers}")
  if curve is not None and workers > 1:
    return curve.at(payload_bytes)
  rate = link.rate.bytes_per_s * link.efficiency.get(op, 1.0) / link.shared_by
  if moved.both_ways and not link.full_duplex:
    rate /= 2
  return moved.hops * link.latency_s + moved.wire_bytes / rate


def ledger_seconds(
  ledger: Ledger, platform: Platform, *, algorithm: str = "ring"
) -> float:
  """Returns the seconds of all collectives of a step, one after the other.

  A move over several axes at once goes over the slowest of their links. Around
  a ring, only one worker of those that share a link sends over it.

  Args:
    ledger: what `jaxmotion.wire.step_bytes` counted, or `exchange` predicts.
    platform: its axes are those that the moves name.
    algorithm: of those collectives that have it; others use the ring.

  Raises:
    ValueError: the platform has no such axis, or one of another size.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> move = Move("all_reduce", ("data",), 8, "float32", 10**6, 1)
    >>> cluster = builtin_platform("ethernet_1gbit")
    >>> round(ledger_seconds(Ledger((move,)), cluster), 6)
    0.0147
  """
  return math.fsum(
    move.count * _move_seconds(move, platform, algorithm)
    for move in ledger.moves
  )


def _move_seconds(move: Move, platform: Platform, algorithm: str) -> float:
  axes = [platform.axis(name) for name in move.axes]
  if math.prod(axis.workers for axis in axes) != move.workers:
    sizes = {axis.name: axis.workers for axis in axes}
    raise ValueError(
      f"`platform` must have {move.workers} workers on {move.axes}, as the "
      f"ledger has, got {sizes}: see Platform.resize."
    )
  if (move.op, algorithm) not in _SHAPES:
    algorithm = "ring"
  links = [axis.link for axis in axes if axis.workers > 1]
  if len(links) > 1 and move.op != "all_to_all":
    links = [dataclasses.replace(link, shared_by=1) for link in links]
  return max(
    (
      collective_seconds(
        move.op, move.payload_bytes, move.workers, link, algorithm=algorithm
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
  the sum; the parts are all-reduced over the other axes, and gathered.

  Args:
    payload_bytes: of the operand on one worker.
    mesh_axes: outermost first.
    dtype: what to call the element type.

  Returns:
    The ledger; `ledger_seconds` says how long it takes.

  Example:
    >>> from jaxmotion.perfmodel import builtin_platform
    >>> cluster = builtin_platform("h100_cluster")
    >>> ledger = hierarchical_all_reduce_ledger(8000, cluster.axes)
    >>> ledger.per_axis()
    {('device',): 14000.0, ('host',): 1875.0}
    >>> flat = Move("all_reduce", ("host", "device"), 128, "", 10**9, 1)
    >>> parts = hierarchical_all_reduce_ledger(10**9, cluster.axes)
    >>> part = ledger_seconds(parts, cluster)
    >>> part < ledger_seconds(Ledger((flat,)), cluster)
    True
  """
  *outer, inner = mesh_axes

  def move(op: str, nbytes: int) -> Move:
    return Move(op, (inner.name,), inner.workers, dtype, nbytes, 1)

  if not outer:
    return Ledger((move("all_reduce", payload_bytes),))
  part = -(-payload_bytes // inner.workers)
  between = hierarchical_all_reduce_ledger(part, outer, dtype=dtype).moves
  scatter, gather = (
    move("reduce_scatter", payload_bytes),
    move("all_gather", part),
  )
  return Ledger((scatter, *between, gather))
