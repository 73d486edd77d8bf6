"""The clocks of a step, of many assignments at once.

The recurrence of `perfmodel.overlapped_seconds`, on arrays. It is linear in
the algebra of maximum and sum, so what is left of a step after some messages
is four numbers, whatever the clocks show.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class StageTimes(NamedTuple):
  """Seconds of a message: of the device, of the link, of decoding."""

  device_s: np.ndarray
  link_s: np.ndarray
  decode_s: np.ndarray


class PipelineState(NamedTuple):
  """Where steps stand after some of their messages; arrays of one shape.

  Attributes:
    device: when the message is encoded.
    link: when it has arrived.
    done: when it is decoded, if nothing is computed any more.
    decode: seconds of all decoding so far.
  """

  device: np.ndarray
  link: np.ndarray
  done: np.ndarray
  decode: np.ndarray


class PipelineSuffix(NamedTuple):
  """Messages that follow: from each clock, the seconds to the end.

  Attributes:
    device: by way of the links.
    link: from the arrival.
    done: from the decoding.
    both: from the device's clock and all decoding.
  """

  device: float
  link: float
  done: float
  both: float


NOTHING = PipelineSuffix(-np.inf, -np.inf, 0.0, 0.0)
"""No messages."""


def init_pipeline(many: int) -> PipelineState:
  """The clocks at the start of so many steps."""
  return PipelineState(*np.zeros((4, many)))


def advance_pipeline(clock: PipelineState, parts: StageTimes) -> PipelineState:
  """The clocks after one more message."""
  device = clock.device + parts.device_s
  link = np.maximum(device, clock.link) + parts.link_s
  done = np.maximum(clock.done, link) + parts.decode_s
  return PipelineState(device, link, done, clock.decode + parts.decode_s)


def prepend_stage(parts: StageTimes, rest: PipelineSuffix) -> PipelineSuffix:
  """What follows if a message comes before it; parts of one step."""
  device, link, decode = map(float, parts)
  arrival = max(decode + rest.done, rest.link)
  return PipelineSuffix(
    device + max(link + arrival, rest.device),
    link + arrival,
    decode + rest.done,
    device + decode + rest.both,
  )


def finish_time(clock: PipelineState, rest: PipelineSuffix) -> np.ndarray:
  """When steps end."""
  return np.max(
    [
      clock.device + rest.device,
      clock.link + rest.link,
      clock.done + rest.done,
      clock.device + clock.decode + rest.both,
    ],
    axis=0,
  )
