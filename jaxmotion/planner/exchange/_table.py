"""Tables of what every codec on every tensor adds to the step, and pipelines.

A pipeline vectorizes the recurrence of `perfmodel.predict_step`. With
device time `D`, arrival `L` and decoding `T` of message `i`,

    D_i = D_{i-1} + device_s
    L_i = max(D_i, L_{i-1}) + link_s
    T_i = max(T_{i-1}, L_i) + decode_s, with T_0 = D_n

The recurrence is linear in max-plus algebra: max takes the place of addition,
addition that of multiplication. All later messages are therefore four numbers
(a `PipelineSuffix`), whatever the state before them. The search completes
every label with the same suffix in four additions.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmotion import codecs, core, perfmodel, wire
from jaxmotion.collectives.extend import is_summed
from jaxmotion.core import PyTree, ShapedLike
from jaxmotion.perfmodel.extend import move_seconds, sum_axis_bytes
from jaxmotion.planner.exchange import _problem

# The seconds of a collective are interpolated linearly between these sizes.
_KNOTS = 256


class StageTimes(NamedTuple):
  """Seconds of one message on the device, on the link and in decoding."""

  device_s: np.ndarray
  link_s: np.ndarray
  decode_s: np.ndarray


class PipelineState(NamedTuple):
  """Times that many pipelines have reached; arrays of one shape.

  Attributes:
    device_s: when the last message is encoded.
    link_s: when the last message has arrived.
    done_s: when it is decoded, if the device has nothing left to compute.
    decode_s: seconds of all decoding so far.
  """

  device_s: np.ndarray
  link_s: np.ndarray
  done_s: np.ndarray
  decode_s: np.ndarray


class PipelineSuffix(NamedTuple):
  """Seconds from each time of a state to the end of the step.

  Attributes:
    device_s: from the device's time, by way of the links.
    link_s: from the last arrival.
    done_s: from the last decoding.
    both_s: from the device's time plus all decoding so far. Decoding waits
      for the end of the backward pass, and then never for the link.
  """

  device_s: float
  link_s: float
  done_s: float
  both_s: float


EMPTY_SUFFIX = PipelineSuffix(-np.inf, -np.inf, 0.0, 0.0)
"""The suffix without messages."""


def init_pipeline(count: int) -> PipelineState:
  """Returns the start of `count` steps."""
  return PipelineState(*np.zeros((4, count)))


def advance_pipeline(state: PipelineState, stage: StageTimes) -> PipelineState:
  """Returns the state after one more message."""
  device = state.device_s + stage.device_s
  link = np.maximum(device, state.link_s) + stage.link_s
  done = np.maximum(state.done_s, link) + stage.decode_s
  return PipelineState(device, link, done, state.decode_s + stage.decode_s)


def prepend_stage(stage: StageTimes, suffix: PipelineSuffix) -> PipelineSuffix:
  """Returns the suffix that begins with one more message."""
  # `stage`: seconds of the message in one step, as scalars.
  device, link, decode = map(float, stage)
  arrival = max(decode + suffix.done_s, suffix.link_s)
  return PipelineSuffix(
    device + max(link + arrival, suffix.device_s),
    link + arrival,
    decode + suffix.done_s,
    device + decode + suffix.both_s,
  )


def finish_time(state: PipelineState, suffix: PipelineSuffix) -> np.ndarray:
  """Returns the seconds at which each step ends."""
  return np.max(
    [
      state.device_s + suffix.device_s,
      state.link_s + suffix.link_s,
      state.done_s + suffix.done_s,
      state.device_s + state.decode_s + suffix.both_s,
    ],
    axis=0,
  )


class TensorCosts:
  """Exchange predictions of single tensors, each computed once."""

  def __init__(self, problem: _problem.ExchangeProblem):
    self.problem = problem
    self._known: dict[tuple[Any, ...], perfmodel.ExchangePrediction] = {}

  def predict_tensor(
    self,
    codec: codecs.Codec,
    like: jax.ShapeDtypeStruct,
    method: str | None,
    mixed: bool,
  ) -> perfmodel.ExchangePrediction:
    """Predicts the exchange of one tensor, its own part if others join it."""
    summed = is_summed(codec, like)
    joins_others = summed and mixed and self.problem.workers == 2
    method = "gather" if summed else method
    key = codec, like.shape, str(like.dtype), method, joins_others
    if key not in self._known:
      predict = self._predict_joined if joins_others else self._predict_alone
      self._known[key] = predict(codec, like, method)
    return self._known[key]

  def _predict_alone(
    self, codec: codecs.Codec, tree: PyTree, method: str | None
  ) -> perfmodel.ExchangePrediction:
    """Predicts the exchange of a tree of tensors by itself."""
    platform, axis = self.problem.platform, self.problem.mesh_axis
    return perfmodel.predict_exchange(
      tree, platform, axis, codec, method=method
    )

  def _predict_joined(
    self, codec: codecs.Codec, like: ShapedLike, method: str | None
  ) -> perfmodel.ExchangePrediction:
    """Predicts what a summed tensor adds to an exchange that gathers."""
    # The cost of one more tensor is a difference. It is the exchange of the
    # tensor beside one bfloat16 element, which is not summed, minus that
    # element's own.
    unsummed = codecs.cast("bfloat16")
    element = jax.ShapeDtypeStruct((1,), "float32")
    pair = codecs.rules((("0", codec), ("1", unsummed)))
    both = self._predict_alone(pair, (like, element), method)
    other = self._predict_alone(unsummed, element, method)
    payload = {collective_kind(m): m.payload_bytes for m in both.ledger.moves}
    for move in other.ledger.moves:
      payload[collective_kind(move)] -= move.payload_bytes
    moves = [k._replace(payload_bytes=n) for k, n in payload.items() if n]
    return both._replace(
      ledger=wire.Ledger(tuple(moves)),
      encode_s=both.encode_s - other.encode_s,
      recode_s=both.recode_s - other.recode_s,
      decode_s=both.decode_s - other.decode_s,
    )


def collective_kind(move: wire.Move) -> wire.Move:
  """Returns the collective that a move is a part of, without its bytes."""
  return move._replace(payload_bytes=0)


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
    sent: float64[kinds, axes], bytes over each axis of the workers, the slowest
      first, for each payload byte.
    curves: for each kind, payload bytes of a collective and its seconds.
  """

  schedule: _problem.BucketSchedule
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
  ) -> StageTimes:
    """Returns the stage of a bucket, from sums over its tensors."""
    # `gap_s`: seconds of computation before the bucket is ready.
    # `coding_s`: float64[..., 3], seconds of encoding, recoding and decoding.
    # `payload`: float64[..., kinds], bytes in each kind of collective.
    encode, recode, decode = np.moveaxis(coding_s, -1, 0)
    link = self.link_seconds(payload) + recode
    if self.overlap:
      return StageTimes(gap_s + encode, link, decode)
    zero = np.zeros_like(link)
    return StageTimes(gap_s + encode + link + decode, zero, zero)

  def step_seconds(self, choices: np.ndarray) -> np.ndarray:
    """Returns the seconds of the step for int[n, tensors] choices of codecs."""
    state = init_pipeline(len(choices))
    schedule = self.schedule
    for gap_s, bucket in zip(schedule.gaps_s, schedule.buckets, strict=False):
      stage = self.stage_times(
        gap_s, *self.sum_costs(np.array(bucket), choices)
      )
      state = advance_pipeline(state, stage)
    return finish_time(state, self.last_suffix()) + schedule.tail_s

  def sum_costs(
    self, tensors: np.ndarray, choices: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Returns coding seconds and payload bytes of some tensors, added up."""
    # `choices`: int[..., all tensors], a codec for each tensor.
    codecs_used = tensors, choices[..., tensors]
    return self.coding_s[codecs_used].sum(-2), self.payload[codecs_used].sum(-2)

  def last_suffix(self) -> PipelineSuffix:
    """Returns the computation after the last bucket is ready."""
    zero = np.zeros(())
    last = StageTimes(zero + self.schedule.gaps_s[-1], zero, zero)
    return prepend_stage(last, EMPTY_SUFFIX)

  def axis_bytes(self, tensor: int, codec: int) -> list[float]:
    """Returns the bytes that a worker sends of one tensor over each axis."""
    return list(map(float, self.payload[tensor, codec] @ self.sent))

  def total_seconds(self, choice: np.ndarray) -> float:
    """Returns the seconds of the step for one int[tensors] choice."""
    return float(self.step_seconds(choice[None])[0])


def make_table(
  costs: TensorCosts,
  candidates: Sequence[codecs.Codec],
  method: str | None,
  *,
  mixed: bool,
) -> StepTable:
  """Predicts every codec on every tensor, for the search of the best choice."""
  # `mixed`: whether something that is not summed travels beside the sums.
  problem = costs.problem
  # A row for each tensor.
  exchanges = [
    [costs.predict_tensor(codec, leaf, method, mixed) for codec in candidates]
    for leaf in jax.tree.leaves(problem.step_cost.params)
  ]
  moves = [m for row in exchanges for e in row for m in e.ledger.moves]
  kinds = sorted(set(map(collective_kind, moves)))
  payload = np.zeros((len(exchanges), len(candidates), len(kinds)))
  for i, row in enumerate(exchanges):
    for j, exchange in enumerate(row):
      for move in exchange.ledger.moves:
        kind = kinds.index(collective_kind(move))
        payload[i, j, kind] += move.payload_bytes
  largest = payload.max(1, initial=1).sum(0)
  coding_s = [
    [(e.encode_s, e.recode_s, e.decode_s) for e in row] for row in exchanges
  ]
  axes = core.axis_names(problem.mesh_axis)
  ones = [k._replace(payload_bytes=1) for k in kinds]
  per_byte = [sum_axis_bytes([one], axes) for one in ones]
  usable = [mixed or codec.summable for codec in candidates]
  return StepTable(
    problem.schedule,
    problem.overlap,
    method,
    np.flatnonzero(usable),
    np.array(coding_s),
    payload,
    np.array([[*sent.values()] for sent in per_byte]),
    tuple(
      _collective_curve(problem, kind, int(n))
      for kind, n in zip(kinds, largest, strict=True)
    ),
  )


def _collective_curve(
  problem: _problem.ExchangeProblem, kind: wire.Move, max_bytes: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns payload bytes and seconds of one kind of collective."""
  sizes = np.unique(np.rint(np.geomspace(1, 1 + max_bytes, _KNOTS)))
  moves = [kind._replace(payload_bytes=int(n)) for n in sizes]
  seconds = [move_seconds(move, problem.platform, "ring") for move in moves]
  return sizes, np.array(seconds)
