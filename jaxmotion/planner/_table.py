"""What every codec on every tensor does to the step, as tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxmotion.codecs import Codec, cast, rules
from jaxmotion.core import Like, PyTree
from jaxmotion.perfmodel import (
  Exchange,
  Platform,
  Work,
  ledger_seconds,
  predict_exchange,
  ready_seconds,
  seconds,
)
from jaxmotion.planner._clock import (
  NOTHING,
  Parts,
  Rest,
  before,
  end,
  start,
  tick,
)
from jaxmotion.wire import Ledger, Move

# Between these sizes the seconds of a collective are a straight line.
_KNOTS = 256


@dataclasses.dataclass(frozen=True)
class Route:
  """How gradients travel, whatever their codecs.

  Attributes:
    platform: devices and links.
    axis: of the workers, or of the hosts.
    within: the axis of the devices of one host, if they reduce first.
    bucket_bytes: of gradients that travel together, at least; None for all.
    overlap: whether links and devices work at once.
    algorithm: of the collectives.
  """

  platform: Platform
  axis: str
  within: str | None = None
  bucket_bytes: int | None = None
  overlap: bool = True
  algorithm: str = "ring"


class Timeline(NamedTuple):
  """When gradients are there.

  Attributes:
    buckets: positions of the tensors that travel together, first ones first.
    gaps: seconds of computing before each bucket is there, and after the last.
    tail_s: of the update and the call.
  """

  buckets: tuple[tuple[int, ...], ...]
  gaps: tuple[float, ...]
  tail_s: float


def timeline(work: Work, route: Route) -> Timeline:
  """Puts tensors into buckets, as `perfmodel.data_parallel` does."""
  device = route.platform.device
  ready = ready_seconds(work.gradient, device)[1:]
  leaves = jax.tree.leaves(work.params)
  order = sorted(range(len(leaves)), key=lambda i: ready[i])
  most = math.inf if route.bucket_bytes is None else route.bucket_bytes
  buckets: list[tuple[int, ...]] = []
  full: list[int] = []
  nbytes = 0
  for i in order:
    full.append(i)
    nbytes += math.prod(leaves[i].shape) * leaves[i].dtype.itemsize
    if nbytes >= most:
      buckets.append(tuple(full))
      full, nbytes = [], 0
  if full:
    buckets.append(tuple(full))
  ends = [0.0, *(ready[bucket[-1]] for bucket in buckets)]
  compute = seconds(work.gradient, device)
  gaps = [b - a for a, b in zip(ends, [*ends[1:], compute], strict=True)]
  gaps[-1] = max(gaps[-1], 0.0)
  tail = seconds(work.update, device) + device.call_s
  return Timeline(tuple(buckets), tuple(gaps), tail)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
  """Figures of every codec on every tensor, under one method.

  Attributes:
    when: gradients are there.
    overlap: whether links and devices work at once.
    coding: float64[tensors, codecs, 3], seconds of encoding, of recoding
      between two phases and of decoding.
    payload: float64[tensors, codecs, kinds], bytes in each kind of collective.
    sent: float64[kinds], bytes on the wire for each of them.
    curves: of each kind, bytes of a collective and its seconds.
  """

  when: Timeline
  overlap: bool
  coding: np.ndarray
  payload: np.ndarray
  sent: np.ndarray
  curves: tuple[tuple[np.ndarray, np.ndarray], ...]

  def link_seconds(self, payload: np.ndarray) -> np.ndarray:
    """Seconds of the collectives of [..., kinds] bytes."""
    total = np.zeros(payload.shape[:-1])
    for kind, (sizes, times) in enumerate(self.curves):
      nbytes = payload[..., kind]
      total += np.where(nbytes > 0, np.interp(nbytes, sizes, times), 0.0)
    return total

  def parts(self, gap: float, coding: np.ndarray, payload: np.ndarray) -> Parts:
    """What a bucket of these sums does to the clocks."""
    encode, recode, decode = np.moveaxis(coding, -1, 0)
    link = self.link_seconds(payload) + recode
    if self.overlap:
      return Parts(gap + encode, link, decode)
    zero = np.zeros_like(link)
    return Parts(gap + encode + link + decode, zero, zero)

  def totals(self, choices: np.ndarray) -> np.ndarray:
    """Seconds of the step for int[many, tensors] choices of codecs."""
    clock = start(len(choices))
    for gap, bucket in zip(self.when.gaps, self.when.buckets, strict=False):
      of = np.array(bucket)
      coding = self.coding[of, choices[:, of]].sum(1)
      payload = self.payload[of, choices[:, of]].sum(1)
      clock = tick(clock, self.parts(gap, coding, payload))
    return end(clock, self.after_all()) + self.when.tail_s

  def after_all(self) -> Rest:
    """What is computed when all gradients are there."""
    zero = np.zeros(())
    return before(Parts(zero + self.when.gaps[-1], zero, zero), NOTHING)

  def wire_bytes(self, tensor: int, codec: int) -> float:
    """What a worker sends of a tensor."""
    return float(self.payload[tensor, codec] @ self.sent)

  def total(self, choice: np.ndarray) -> float:
    """Seconds of the step for one choice."""
    return float(self.totals(choice[None])[0])


class Prices:
  """The exchange of one tensor at a time, each predicted once.

  Args:
    route: how gradients travel.
  """

  def __init__(self, route: Route):
    self.route = route
    self._axis = route.platform.axis(route.axis)
    self._known: dict[tuple, Exchange] = {}

  def price(
    self,
    codec: Codec,
    like: jax.ShapeDtypeStruct,
    method: str | None,
    mixed: bool,
  ) -> Exchange:
    """Predicts the exchange of a tensor.

    Args:
      codec: of the tensor.
      like: shape and dtype of the tensor.
      method: "gather", "two_phase" or the exchange's own choice, if it is not
        summed.
      mixed: whether others are not summed. Between two workers, small sums
        then go with them.
    """
    beside = codec.summable and mixed and self._axis.workers == 2
    method = "gather" if codec.summable else method
    key = codec, like.shape, str(like.dtype), method, beside
    if key not in self._known:
      predict = self._beside if beside else self._alone
      self._known[key] = predict(codec, like, method)
    return self._known[key]

  def link_seconds(self, kind: Move, nbytes: int) -> float:
    """Seconds of one collective of so many bytes."""
    ledger = Ledger((kind._replace(payload_bytes=nbytes),))
    route = self.route
    return ledger_seconds(ledger, route.platform, algorithm=route.algorithm)

  def _alone(self, codec: Codec, tree: PyTree, method: str | None) -> Exchange:
    route = self.route
    return predict_exchange(
      codec,
      tree,
      route.platform,
      route.axis,
      method=method,
      within=route.within,
      algorithm=route.algorithm,
    )

  def _beside(self, codec: Codec, like: Like, method: str | None) -> Exchange:
    """What a tensor adds to an exchange that is not a sum."""
    words, one = cast("bfloat16"), jax.ShapeDtypeStruct((1,), "float32")
    codecs = rules((("0", codec), ("1", words)))
    both = self._alone(codecs, (like, one), method)
    other = self._alone(words, one, method)
    left = {_kind(m): m.payload_bytes for m in both.ledger.moves}
    for move in other.ledger.moves:
      left[_kind(move)] -= move.payload_bytes
    moves = [k._replace(payload_bytes=n) for k, n in left.items() if n]
    return both._replace(
      ledger=Ledger(tuple(moves)),
      encode_s=both.encode_s - other.encode_s,
      recode_s=both.recode_s - other.recode_s,
      decode_s=both.decode_s - other.decode_s,
    )


def make_table(
  work: Work,
  prices: Prices,
  candidates: Sequence[Codec],
  method: str | None,
  *,
  mixed: bool,
) -> Table:
  """Prices every codec on every tensor.

  Args:
    work: of one worker.
    prices: of its tensors.
    candidates: the codecs.
    method: as for `Prices.price`.
    mixed: as for `Prices.price`.
  """
  found = [
    [prices.price(codec, leaf, method, mixed) for codec in candidates]
    for leaf in jax.tree.leaves(work.params)
  ]
  moves = [m for row in found for e in row for m in e.ledger.moves]
  kinds = sorted(set(map(_kind, moves)))
  payload = np.zeros((len(found), len(candidates), len(kinds)))
  for i, row in enumerate(found):
    for j, exchange in enumerate(row):
      for move in exchange.ledger.moves:
        payload[i, j, kinds.index(_kind(move))] += move.payload_bytes
  curves = [
    _curve(prices, kind, int(n))
    for kind, n in zip(kinds, payload.max(1, initial=1).sum(0), strict=True)
  ]
  coding = [
    [(e.encode_s, e.recode_s, e.decode_s) for e in row] for row in found
  ]
  return Table(
    timeline(work, prices.route),
    prices.route.overlap,
    np.array(coding),
    payload,
    np.array([k._replace(payload_bytes=1).wire_bytes for k in kinds]),
    tuple(curves),
  )


def _curve(
  prices: Prices, kind: Move, most: int
) -> tuple[np.ndarray, np.ndarray]:
  sizes = np.unique(np.rint(np.geomspace(1, 1 + most, _KNOTS)))
  return sizes, np.array([prices.link_seconds(kind, int(n)) for n in sizes])


def _kind(move: Move) -> Move:
  return move._replace(payload_bytes=0)
