"""Record by which a driver tells the exchanges of a step how to send.

Within one program a payload is sent in one buffer, or in two halves. A step of
several programs sends more: each piece is on the link while what the next one
holds is being computed.

XLA:CPU may run a sum in a branch beside another sum that it does not depend on.
Devices that begin with different ones wait for one another, and the process
ends in a crash. So a branch that sends waits for the sums that were made before
it. XLA:CPU orders all other sums by itself.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmotion import core
from jaxmotion.core import Array, PyTree
from jaxmotion.hosts import _xla_cpu

RECEIVED = "received"
"""Name of arrays that the program of a collective computes behind it."""
COMPUTED = "computed"
"""Name of arrays that a program computes for one that sends beside the next
step."""

# A piece costs about a millisecond of messages on busy cores, and round trips.
_MIN_PIECE_BYTES = 1 << 17


# A pytree of its sums, so that it passes maps and branches.
@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["sums"],
  meta_fields=["most_pieces", "swap_bytes", "phase"],
)
@dataclasses.dataclass(frozen=True)
class Sending:
  """Says how the collectives of a step send."""

  # Pieces that a large payload is sent in; 0: the step is one program.
  most_pieces: int = 0
  # Up to so many bytes, two CPU workers swap the words of a piece and do not
  # add them. A swap takes one round trip and a sum two.
  swap_bytes: float = 0.0
  # Number of a step that does what this one does, if the host knows it; None:
  # the program finds out what to do.
  phase: int | None = None
  # What sums over workers made, for which branches that send wait.
  sums: tuple[Array, ...] = ()

  @property
  def has_pieces(self) -> bool:
    """Whether payloads are sent in pieces."""
    return self.most_pieces > 0

  def wait_for(self, made: PyTree) -> "Sending":
    """Lets branches wait for the sums among arrays; others need no wait."""
    sums = [
      x
      for x in jax.tree.leaves(made)
      if jnp.issubdtype(x.dtype, jnp.floating) and x.size
    ]
    return dataclasses.replace(self, sums=(*self.sums, *sums))

  def keep_scalars(self) -> "Sending":
    """Lets branches wait for scalars alone, which no axis of a model cuts."""
    scalars = tuple(x for x in self.sums if not jnp.ndim(x))
    return dataclasses.replace(self, sums=scalars)

  def order_branch(self, index: Array) -> Array:
    """Returns the index or predicate of a branch, computed after the sums."""
    for x in self.sums:
      if index.dtype == bool:
        index = _xla_cpu.schedule_after(index.astype(jnp.int32), x) > 0
      else:
        index = _xla_cpu.schedule_after(index, x)
    return index

  def split_in_pieces(self, payloads: Sequence[PyTree]) -> list[list[PyTree]]:
    """Splits payloads into pieces of about the same bytes, in their order."""
    # The last piece is sent first: the backward pass computes gradients from
    # the last array to the first.
    sizes = [core.tree_bytes(p) for p in payloads]
    total = sum(sizes)
    count = max(1, min(self.most_pieces, total // _MIN_PIECE_BYTES))
    pieces: list[list[PyTree]] = [[] for _ in range(count)]
    end = 0.0
    for payload, size in zip(payloads, sizes, strict=True):
      # The piece in which the middle of the payload falls.
      middle = end + size / 2
      place = min(int(middle * count / max(total, 1)), count - 1)
      pieces[place].append(payload)
      end += size
    return [piece for piece in pieces if piece]


AT_ONCE = Sending()
"""One program, in which no sum comes before a branch that sends."""


def check_sending(sending: Sending | None) -> Sending:
  """Returns how to send; None, as without a driver, is `AT_ONCE`."""
  if sending is None:
    return AT_ONCE
  core.instance(Sending, "what `make_train_step` gives to an update")(
    "sending", sending
  )
  return sending


def mark_received(tree: PyTree) -> PyTree:
  """Marks arrays that a sending program computes from what it received."""
  return jax.tree.map(lambda a: checkpoint_name(a, RECEIVED), tree)


def mark_computed(tree: PyTree) -> PyTree:
  """Marks arrays that no program computes which sends beside a step."""
  # It would read what the next step writes to, which would wait for it.
  return jax.tree.map(lambda a: checkpoint_name(a, COMPUTED), tree)
