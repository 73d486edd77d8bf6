"""Pipelines of computation, transfer and decoding, many choices at once.

Vectorizes the recurrence of `perfmodel.overlapped_seconds`. With device time
`D`, arrival `L` and decoding `T` of message `i`,

    D_i = D_{i-1} + device_s
    L_i = max(D_i, L_{i-1}) + link_s
    T_i = max(T_{i-1}, L_i) + decode_s, with T_0 = D_n

The recurrence is linear in max-plus algebra: max takes the place of addition,
addition that of multiplication. All later messages are therefore four numbers
(a `PipelineSuffix`), whatever the state before them. The search completes
every label with the same suffix in four additions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


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
