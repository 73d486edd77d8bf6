"""Pieces of payloads, which a step sends one after the other.

Within one program a payload is sent in one buffer, or in two halves. A step of
several programs sends more: each piece is on the link while what the next one
holds is being computed.
"""

import contextlib
import contextvars
from collections.abc import Iterator, Sequence

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxmotion.core import PyTree, tree_bytes
from jaxmotion.program import RECEIVED

# A piece costs about a millisecond of messages on busy cores, and round trips.
_MIN_PIECE_BYTES = 1 << 17

_most: contextvars.ContextVar[int] = contextvars.ContextVar("most", default=0)


@contextlib.contextmanager
def send_in_pieces(most: int) -> Iterator[None]:
  """Lets collectives, traced in this context, send in pieces.

  Args:
    most: number of pieces that a large payload is sent in.
  """
  token = _most.set(most)
  try:
    yield
  finally:
    _most.reset(token)


def sends_pieces() -> bool:
  """Says whether payloads are sent in pieces here."""
  return _most.get() > 0


def split_in_pieces(payloads: Sequence[PyTree]) -> list[list[PyTree]]:
  """Splits payloads into pieces of about the same bytes, in their order.

  The last piece is sent first: the backward pass computes gradients from the
  last array to the first.

  Args:
    payloads: payloads of several arrays, in the order of the tree.
  """
  sizes = [tree_bytes(p) for p in payloads]
  total = sum(sizes)
  count = max(1, min(_most.get(), total // _MIN_PIECE_BYTES))
  pieces: list[list[PyTree]] = [[] for _ in range(count)]
  end = 0.0
  for payload, size in zip(payloads, sizes, strict=True):
    # The piece in which the middle of the payload falls.
    middle = end + size / 2
    pieces[min(int(middle * count / max(total, 1)), count - 1)].append(payload)
    end += size
  return [piece for piece in pieces if piece]


def mark_received(tree: PyTree) -> PyTree:
  """Returns arrays, which the program that sends computes from what it got.

  Args:
    tree: arrays that the next program reads.
  """
  return jax.tree.map(lambda a: checkpoint_name(a, RECEIVED), tree)
