"""Computes when a step ends, with and without overlap of its exchange."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from jaxmotion import core


class Message(NamedTuple):
  """One bucket of gradients that is encoded, sent and decoded by itself.

  Args:
    compute_s: seconds of computing, from when the previous bucket was ready
      until this one is.
    encode_s: seconds of encoding on the device, which computes nothing else
      meanwhile.
    link_s: seconds on the link, including the recoding between two phases.
    decode_s: seconds of decoding on the device, after the backward pass.

  Example:
    >>> Message(1e-3, 1e-4, 2e-3, 1e-4).link_s
    0.002
  """

  compute_s: float
  encode_s: float
  link_s: float
  decode_s: float


def blocking_seconds(messages: Iterable[Message]) -> float:
  """Returns when the last message is decoded if nothing overlaps.

  Args:
    messages: buckets, in the order in which their gradients appear.

  Returns:
    Seconds from the start of the step.

  Raises:
    TypeError: `messages` has something else than messages.

  Example:
    >>> blocking_seconds([Message(2, 0, 3, 0), Message(2, 0, 3, 0)])
    10.0
  """
  return math.fsum(
    part for message in _check_messages(messages) for part in message
  )


def overlapped_seconds(messages: Iterable[Message]) -> float:
  r"""Returns when the last message is decoded if the link runs concurrently.

  The device computes and encodes one message after the other, and the link
  carries them in the same order. Once the backward pass is over, the device
  decodes the received messages:

  .. math::
    D_i = D_{i-1} + c_i + e_i \quad
    L_i = \max(D_i, L_{i-1}) + x_i \quad
    T_i = \max(T_{i-1}, L_i) + d_i

  with :math:`T_0 = D_n`. Encoding a message delays all later gradients.

  Args:
    messages: buckets, in the order in which their gradients appear.

  Returns:
    Seconds from the start of the step.

  Raises:
    TypeError: `messages` has something else than messages.

  Example:
    >>> overlapped_seconds([Message(2, 0, 3, 0), Message(2, 0, 3, 0)])
    8.0

  References:
    Castello et al., Performance modeling for distributed training of
    convolutional neural networks, 2021; Wang et al., Espresso, 2023.
  """
  device = link = 0.0
  arrivals = []
  for message in _check_messages(messages):
    device += message.compute_s + message.encode_s
    link = max(device, link) + message.link_s
    arrivals.append((link, message.decode_s))
  end = device
  for arrival, decode_s in arrivals:
    end = max(end, arrival) + decode_s
  return end


def _check_messages(messages: Iterable[Message]) -> tuple[Message, ...]:
  try:
    found = tuple(messages)
  except TypeError:
    raise TypeError(
      f"`messages` must be Message objects, got {messages!r}."
    ) from None
  for i, message in enumerate(found):
    core.check_instance(f"messages[{i}]", message, Message, "a Message")
  return found
