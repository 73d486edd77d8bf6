"""Pieces of payloads, which a step sends one after the other.

Within one program a payload is sent in one buffer, or in two halves. A step of
several programs sends more: each piece is on the link while what the next one
holds is being computed.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxmotion import core, program
from jaxmotion.core import PyTree

# A piece costs about a millisecond of messages on busy cores, and round trips.
_MIN_PIECE_BYTES = 1 << 17


class _Sending(NamedTuple):
  """Describes how the collectives of a context send.

  Attributes:
    most: number of pieces that a large payload is sent in, or 0.
    swap_bytes: up to this many, two CPU workers swap words and do not add them.
  """

  most: int = 0
  swap_bytes: float = 0.0


_IN_ONE = _Sending()
_sending: contextvars.ContextVar[_Sending] = contextvars.ContextVar(
  "sending", default=_IN_ONE
)


@contextlib.contextmanager
def send_in_pieces(most: int, swap_bytes: float = 0.0) -> Iterator[None]:
  """Lets collectives, traced in this context, send in pieces.

  Args:
    most: number of pieces that a large payload is sent in.
    swap_bytes: up to this many bytes of a piece, two CPU workers swap their
      words. A swap takes one round trip and a sum two.
  """
  token = _sending.set(_Sending(most, swap_bytes))
  try:
    yield
  finally:
    _sending.reset(token)


def sends_pieces() -> bool:
  """Says whether payloads are sent in pieces here."""
  return _sending.get().most > 0


def are_swapped(nbytes: int) -> bool:
  """Says whether two CPU workers swap a piece of so many bytes here."""
  return nbytes <= _sending.get().swap_bytes


def split_in_pieces(payloads: Sequence[PyTree]) -> list[list[PyTree]]:
  """Splits payloads into pieces of about the same bytes, in their order."""
  # The last piece is sent first: the backward pass computes gradients from the
  # last array to the first.
  sizes = [core.tree_bytes(p) for p in payloads]
  total = sum(sizes)
  count = max(1, min(_sending.get().most, total // _MIN_PIECE_BYTES))
  pieces: list[list[PyTree]] = [[] for _ in range(count)]
  end = 0.0
  for payload, size in zip(payloads, sizes, strict=True):
    # The piece in which the middle of the payload falls.
    middle = end + size / 2
    pieces[min(int(middle * count / max(total, 1)), count - 1)].append(payload)
    end += size
  return [piece for piece in pieces if piece]


def mark_received(tree: PyTree) -> PyTree:
  """Returns arrays, which the program that sends computes from what it got."""
  return jax.tree.map(lambda a: checkpoint_name(a, program.RECEIVED), tree)
