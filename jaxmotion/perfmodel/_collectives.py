"""Predicts the messages, bytes and seconds of collectives.

Public functions check their arguments. `move_seconds` does not: the planner
calls it thousands of times for one plan, and the checks took longer than the
arithmetic.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxmotion import core
from jaxmotion.perfmodel import _cost, _platform, _roofline
from jaxmotion.perfmodel._platform import Link, Platform
from jaxmotion.wire import Ledger, Move

ALGORITHMS = ("ring", "halving_doubling", "tree")
check_algorithm = core.choice(ALGORITHMS)
_check_ledger = core.instance(Ledger, "a Ledger of jaxmotion.wire")
_TRAFFIC_ARGS: dict[str, core.Kind] = {
  "op": core.choice(_platform.COLLECTIVES),
  "payload_bytes": core.number(0),
  "workers": core.integer(1),
}
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


class CollectiveTraffic(NamedTuple):
  """Messages and bytes of the busiest worker in one collective.

  Args:
    hops: number of messages that have to wait for one another.
    wire_bytes: bytes that the worker sends, or that its successor waits for.

  Example:
    >>> collective_traffic("all_reduce", 1e6, 4)
    CollectiveTraffic(hops=6, wire_bytes=1500000.0)
  """

  hops: int
  wire_bytes: float


@core.declare(**_TRAFFIC_ARGS)
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
  _check_support(op, workers, algorithm)
  return _count_traffic(op, payload_bytes, workers, algorithm)


def _check_support(op: str, workers: int, algorithm: str) -> None:
  """Raises unless so many workers can run a collective by an algorithm."""
  choices = [name for name in ALGORITHMS if (op, name) in _TRAFFIC]
  core.choice(choices)("algorithm", algorithm)
  if algorithm == "halving_doubling" and workers & (workers - 1):
    raise ValueError(
      f"`workers` must be a power of two for 'halving_doubling', got {workers}."
    )


def _count_traffic(
  op: str, payload_bytes: float, workers: int, algorithm: str
) -> CollectiveTraffic:
  """Returns `collective_traffic` of checked arguments."""
  if workers == 1:
    return CollectiveTraffic(0, 0.0)
  hops, share = _TRAFFIC[op, algorithm](workers, (workers - 1).bit_length())
  return CollectiveTraffic(hops, share * payload_bytes)


@core.declare(**_TRAFFIC_ARGS, link=core.instance(Link, "a Link"))
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
  (`Link.efficiency`), divided by the workers that share the link. Summing the
  received data is assumed to overlap with the transfer. A curve that was
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
  _check_support(op, workers, algorithm)
  return _link_seconds(op, payload_bytes, workers, link, algorithm)


def _link_seconds(
  op: str,
  payload_bytes: float,
  workers: int,
  link: Link,
  algorithm: str,
  is_shared: bool = True,
) -> float:
  """Returns `collective_seconds` of checked arguments."""
  # is_shared: whether all workers behind the link send over it at a time.
  curve = link.measured.get(f"{op} {workers}")
  if curve is not None and workers > 1:
    return curve.seconds_at(payload_bytes)
  traffic = _count_traffic(op, payload_bytes, workers, algorithm)
  rate = link.rate.bytes_per_s * link.efficiency.get(op, 1.0)
  rate /= link.shared_by if is_shared else 1
  return traffic.hops * link.latency_s + traffic.wire_bytes / rate


@core.declare(
  ledger=_check_ledger,
  platform=_platform.check_platform,
  algorithm=check_algorithm,
)
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
  for move in ledger.moves:
    _check_move(move, platform, algorithm)
  return math.fsum(
    move_seconds(move, platform, algorithm) for move in ledger.moves
  )


def _check_move(move: Move, platform: Platform, algorithm: str) -> None:
  """Raises unless a move fits the mesh axes of a platform."""
  axes = [_platform.find_axis(platform, "ledger", n) for n in move.axes]
  if math.prod(axis.workers for axis in axes) != move.workers:
    sizes = {axis.name: axis.workers for axis in axes}
    raise ValueError(
      f"`platform` must have {move.workers} workers on {move.axes}, as the "
      f"ledger has, got {sizes}: see Platform.resize."
    )
  if move.workers > 1:
    algorithm = _supported_algorithm(move.op, algorithm)
    _check_support(move.op, move.workers, algorithm)


def _supported_algorithm(op: str, algorithm: str) -> str:
  return algorithm if (op, algorithm) in _TRAFFIC else "ring"


def move_seconds(move: Move, platform: Platform, algorithm: str) -> float:
  """Predicts the seconds of all executions of one move of a ledger."""
  axes = [platform.axis(name) for name in move.axes]
  links = [axis.link for axis in axes if axis.workers > 1]
  algorithm = _supported_algorithm(move.op, algorithm)
  # In a ring through several axes, one worker of those behind a link sends
  # over it at a time. An all-to-all sends from all of them at once.
  is_shared = len(links) == 1 or move.op == "all_to_all"
  nbytes, workers = move.payload_bytes, move.workers
  seconds = (
    _link_seconds(move.op, nbytes, workers, link, algorithm, is_shared)
    for link in links
  )
  return move.count * max(seconds, default=0.0)


@core.declare(
  platform=_platform.check_platform,
  cost=core.optional(_cost.check_cost),
  ledger=core.optional(_check_ledger),
)
def uncalibrated(
  platform: Platform,
  cost: _cost.Cost | None = None,
  ledger: Ledger | None = None,
) -> dict[str, tuple[float, float]]:
  """Lists the kernels and collectives that no measurement covers.

  Such kernels and collectives are predicted from the stated rates of the
  device and the links, or extrapolated from the nearest measured size.

  Args:
    platform: a platform with or without measured curves.
    cost: kernels that run on the device.
    ledger: moves that go over the links.

  Returns:
    For each kind of kernel or collective, the smallest and the largest size
    (FLOPs, bytes or payload bytes) that no curve covers.

  Raises:
    TypeError: an argument is of another class.
    ValueError: the platform lacks an axis of the ledger.

  Example:
    >>> import jax
    >>> from jaxmotion.perfmodel import predict_cost, builtin_platform
    >>> x = jax.ShapeDtypeStruct((64, 64), "float32")
    >>> cost = predict_cost(lambda x: x @ x + 1, x)
    >>> uncalibrated(builtin_platform("h100_node"), cost)
    {'matmul float32': (524288.0, 524288.0), 'elementwise': (32768.0, 32768.0)}
  """
  spans: dict[str, tuple[float, float]] = {}
  for name, size, is_covered in _curve_lookups(platform, cost, ledger):
    if not is_covered:
      low, high = spans.get(name, (size, size))
      spans[name] = min(low, size), max(high, size)
  return spans


def _curve_lookups(
  platform: Platform, cost: _cost.Cost | None, ledger: Ledger | None
) -> Iterator[tuple[str, float, bool]]:
  """Yields the curve, size and coverage of every kernel and move."""
  for kernel in cost.kernels if cost else ():
    name, size = _roofline.kernel_curve(kernel)
    curve = platform.device.measured.get(name)
    yield name, size, curve is not None and curve.covers(size)
  for move in ledger.moves if ledger else ():
    name, size = f"{move.op} {move.workers}", float(move.payload_bytes)
    axes = [_platform.find_axis(platform, "ledger", n) for n in move.axes]
    curves = [axis.link.measured.get(name) for axis in axes]
    yield name, size, all(c is not None and c.covers(size) for c in curves)
