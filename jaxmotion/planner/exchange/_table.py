"""Tables of what every codec on every tensor adds to the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxmotion import codecs, wire
from jaxmotion.planner.exchange import _pipeline, _prices, _search

# The seconds of a collective are interpolated linearly between these sizes.
_KNOTS = 256


@dataclasses.dataclass(frozen=True, eq=False)
class StepTable:
  """Costs of every codec on every tensor, under one method.

  A kind of collective (its op, axes and dtype) is sent once for each bucket.
  Payloads of one kind add up before their seconds are looked up.

  Attributes:
    schedule: buckets of gradients and the computation between them.
    overlap: whether links and devices work at the same time.
    method: how payloads that are not summed travel.
    usable: int[n], positions of the codecs that the figures hold for.
    coding_s: float64[tensors, codecs, 3], seconds of encoding, of recoding
      between two phases and of decoding.
    payload: float64[tensors, codecs, kinds], bytes in each kind of collective.
    sent: float64[kinds], bytes on the wire for each payload byte.
    curves: for each kind, payload bytes of a collective and its seconds.
  """

  schedule: _search.BucketSchedule
  overlap: bool
  method: str | None
  usable: np.ndarray
  coding_s: np.ndarray
  payload: np.ndarray
  sent: np.ndarray
  curves: tuple[tuple[np.ndarray, np.ndarray], ...]

  def link_seconds(self, payload: np.ndarray) -> np.ndarray:
    """Returns the seconds of collectives of float64[..., kinds] bytes."""
    total = np.zeros(payload.shape[:-1])
    for kind, (sizes, times) in enumerate(self.curves):
      nbytes = payload[..., kind]
      total += np.where(nbytes > 0, np.interp(nbytes, sizes, times), 0.0)
    return total

  def stage_times(
    self, gap_s: float, coding_s: np.ndarray, payload: np.ndarray
  ) -> _pipeline.StageTimes:
    """Returns the stage of a bucket, from sums over its tensors."""
    # `gap_s`: seconds of computation before the bucket is ready.
    # `coding_s`: float64[..., 3], seconds of encoding, recoding and decoding.
    # `payload`: float64[..., kinds], bytes in each kind of collective.
    encode, recode, decode = np.moveaxis(coding_s, -1, 0)
    link = self.link_seconds(payload) + recode
    if self.overlap:
      return _pipeline.StageTimes(gap_s + encode, link, decode)
    zero = np.zeros_like(link)
    return _pipeline.StageTimes(gap_s + encode + link + decode, zero, zero)

  def step_seconds(self, choices: np.ndarray) -> np.ndarray:
    """Returns the seconds of the step for int[n, tensors] choices of codecs."""
    state = _pipeline.init_pipeline(len(choices))
    schedule = self.schedule
    for gap_s, bucket in zip(schedule.gaps_s, schedule.buckets, strict=False):
      tensors = np.array(bucket)
      coding_s = self.coding_s[tensors, choices[:, tensors]].sum(1)
      payload = self.payload[tensors, choices[:, tensors]].sum(1)
      stage = self.stage_times(gap_s, coding_s, payload)
      state = _pipeline.advance_pipeline(state, stage)
    return _pipeline.finish_time(state, self.last_suffix()) + schedule.tail_s

  def last_suffix(self) -> _pipeline.PipelineSuffix:
    """Returns the computation after the last bucket is ready."""
    zero = np.zeros(())
    last = _pipeline.StageTimes(zero + self.schedule.gaps_s[-1], zero, zero)
    return _pipeline.prepend_stage(last, _pipeline.EMPTY_SUFFIX)

  def wire_bytes(self, tensor: int, codec: int) -> float:
    """Returns the bytes that a worker sends of one tensor."""
    return float(self.payload[tensor, codec] @ self.sent)

  def total_seconds(self, choice: np.ndarray) -> float:
    """Returns the seconds of the step for one int[tensors] choice."""
    return float(self.step_seconds(choice[None])[0])


def make_table(
  costs: _prices.TensorCosts,
  candidates: Sequence[codecs.Codec],
  method: str | None,
  *,
  mixed: bool,
) -> StepTable:
  """Predicts every codec on every tensor."""
  problem = costs.problem
  found = [
    [costs.predict_tensor(codec, leaf, method, mixed) for codec in candidates]
    for leaf in jax.tree.leaves(problem.step_cost.params)
  ]
  moves = [m for row in found for e in row for m in e.ledger.moves]
  kinds = sorted(set(map(_prices.collective_kind, moves)))
  payload = np.zeros((len(found), len(candidates), len(kinds)))
  for i, row in enumerate(found):
    for j, exchange in enumerate(row):
      for move in exchange.ledger.moves:
        kind = kinds.index(_prices.collective_kind(move))
        payload[i, j, kind] += move.payload_bytes
  largest = payload.max(1, initial=1).sum(0)
  coding_s = [
    [(e.encode_s, e.recode_s, e.decode_s) for e in row] for row in found
  ]
  usable = [mixed or codec.summable for codec in candidates]
  return StepTable(
    problem.schedule,
    problem.overlap,
    method,
    np.flatnonzero(usable),
    np.array(coding_s),
    payload,
    np.array([k._replace(payload_bytes=1).wire_bytes for k in kinds]),
    tuple(
      _collective_curve(costs, kind, int(n))
      for kind, n in zip(kinds, largest, strict=True)
    ),
  )


def _collective_curve(
  costs: _prices.TensorCosts, kind: wire.Move, max_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns payload bytes and seconds of one kind of collective."""
  sizes = np.unique(np.rint(np.geomspace(1, 1 + max_bytes, _KNOTS)))
  seconds = [costs.collective_seconds(kind, int(n)) for n in sizes]
  return sizes, np.array(seconds)
