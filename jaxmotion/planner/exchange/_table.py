"""What every codec on every tensor does to the step, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxmotion.codecs import Codec
from jaxmotion.perfmodel import StepCost
from jaxmotion.planner.exchange._buckets import Timeline, timeline
from jaxmotion.planner.exchange._pipeline import (
  NOTHING,
  PipelineSuffix,
  StageTimes,
  advance_pipeline,
  finish_time,
  init_pipeline,
  prepend_stage,
)
from jaxmotion.planner.exchange._prices import TensorCosts, kind_of
from jaxmotion.wire import Move

# Between these sizes the seconds of a collective are a straight line.
_KNOTS = 256


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

  def parts(
    self, gap: float, coding: np.ndarray, payload: np.ndarray
  ) -> StageTimes:
    """What a bucket of these sums does to the clocks."""
    encode, recode, decode = np.moveaxis(coding, -1, 0)
    link = self.link_seconds(payload) + recode
    if self.overlap:
      return StageTimes(gap + encode, link, decode)
    zero = np.zeros_like(link)
    return StageTimes(gap + encode + link + decode, zero, zero)

  def totals(self, choices: np.ndarray) -> np.ndarray:
    """Seconds of the step for int[many, tensors] choices of codecs."""
    clock = init_pipeline(len(choices))
    for gap, bucket in zip(self.when.gaps, self.when.buckets, strict=False):
      of = np.array(bucket)
      coding = self.coding[of, choices[:, of]].sum(1)
      payload = self.payload[of, choices[:, of]].sum(1)
      clock = advance_pipeline(clock, self.parts(gap, coding, payload))
    return finish_time(clock, self.after_all()) + self.when.tail_s

  def after_all(self) -> PipelineSuffix:
    """What is computed when all gradients are there."""
    zero = np.zeros(())
    return prepend_stage(
      StageTimes(zero + self.when.gaps[-1], zero, zero), NOTHING
    )

  def wire_bytes(self, tensor: int, codec: int) -> float:
    """What a worker sends of a tensor."""
    return float(self.payload[tensor, codec] @ self.sent)

  def total(self, choice: np.ndarray) -> float:
    """Seconds of the step for one choice."""
    return float(self.totals(choice[None])[0])


def make_table(
  work: StepCost,
  prices: TensorCosts,
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
  kinds = sorted(set(map(kind_of, moves)))
  payload = np.zeros((len(found), len(candidates), len(kinds)))
  for i, row in enumerate(found):
    for j, exchange in enumerate(row):
      for move in exchange.ledger.moves:
        payload[i, j, kinds.index(kind_of(move))] += move.payload_bytes
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
  prices: TensorCosts, kind: Move, most: int
) -> tuple[np.ndarray, np.ndarray]:
  sizes = np.unique(np.rint(np.geomspace(1, 1 + most, _KNOTS)))
  return sizes, np.array([prices.link_seconds(kind, int(n)) for n in sizes])
