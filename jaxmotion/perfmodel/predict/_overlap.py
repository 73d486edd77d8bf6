"""When a step ends whose exchange goes on beside its backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Message(NamedTuple):
  """A part of the gradients that is exchanged by itself.

  Args:
    compute_s: from when the last one was there to when this one is.
    encode_s: on the device, which computes nothing else meanwhile.
    link_s: of the link, with what is recoded on the way.
    decode_s: on the device, after the backward pass.

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
    messages: in the order in which gradients appear.

  Example:
    >>> blocking_seconds([Message(2, 0, 3, 0), Message(2, 0, 3, 0)])
    10.0
  """
  return math.fsum(part for message in messages for part in message)


def overlapped_seconds(messages: Iterable[Message]) -> float:
  r"""Returns when the last message is decoded if the link works beside.

  The device computes and encodes message after message, the link carries them
  in the same order, and the device decodes what has arrived once the backward
  pass is over:

  .. math::
    D_i = D_{i-1} + c_i + e_i \quad
    L_i = \max(D_i, L_{i-1}) + x_i \quad
    T_i = \max(T_{i-1}, L_i) + d_i

  with :math:`T_0 = D_n`. What a message's encoding takes delays all gradients
  after it.

  Args:
    messages: in the order in which gradients appear.

  Example:
    >>> overlapped_seconds([Message(2, 0, 3, 0), Message(2, 0, 3, 0)])
    8.0

  References:
    Castello et al., Performance modeling for distributed training of
    convolutional neural networks, 2021; Wang et al., Espresso, 2023.
  """
  device = link = 0.0
  arrivals = []
  for message in messages:
    device += message.compute_s + message.encode_s
    link = max(device, link) + message.link_s
    arrivals.append((link, message.decode_s))
  done = device
  for arrival, decode in arrivals:
    done = max(done, arrival) + decode
  return done
