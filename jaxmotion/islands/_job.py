"""An island of several processes, the first of which follows the run.

What it reads is sent to the others by a collective. So all of them land in the
same round, on the same bits, and only one needs the store.
"""

import json
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmotion.core import PyTree
from jaxmotion.islands._follower import Follower, Sent
from jaxmotion.islands._outer_step import Agreed, OuterStep

# Of a header, so that one program sends them all.
_HEADER_BYTES = 512


class JobFollower:
  """Follows a run in each process of a JAX job, which call it together."""

  def __init__(self, follower: Follower | None, outer_step: OuterStep):
    """Makes that of one process: only the first one has a follower."""
    self._follower, self._outer_step = follower, outer_step
    self._sent: Sent | None = None
    self._known: tuple[int, PyTree] = -1, None  # Newest round, and its anchor.
    self.name = _send_header({"name": follower and follower.name})["name"]

  def start(self) -> None:
    """Starts the follower of the first process."""
    if self._follower is not None:
      self._follower.start()

  def stop(self) -> None:
    """Stops the follower of the first process."""
    if self._follower is not None:
      self._follower.stop()

  def send(self, sent: Sent) -> None:
    """Sends the contribution, in the first process."""
    self._sent = sent
    if self._follower is not None:
      self._follower.send(sent)

  def wait_round(self, round: int, timeout_s: float) -> None:
    """Waits in the first process; the others wait for what it sends next."""
    if self._follower is not None:
      self._follower.wait_round(round, timeout_s)

  def read_agreed(self) -> tuple[Agreed, str]:
    """Returns what the first process has read, in all of them."""
    likes, treedef = jax.tree.flatten(self._outer_step.params_like)
    own = self._sent.digest if self._sent else "none"
    header: dict[str, Any] = {}
    anchor: list[Any] = likes
    if self._follower is not None:
      agreed, refused = self._follower.read_agreed()
      anchor = jax.tree.leaves(agreed.anchor)
      header = dict(
        round=agreed.round,
        checksum=agreed.checksum,
        is_counted=agreed.counted.get(self.name) == own,
        is_refused=refused == own,
      )
    header = _send_header(header)
    if header["round"] != self._known[0]:
      # As bytes, because a sum of floats turns -0 into 0.
      data = multihost_utils.broadcast_one_to_all(
        [
          np.zeros(x.size * x.dtype.itemsize, np.uint8)
          if self._follower is None
          else np.asarray(x).reshape(-1).view(np.uint8)
          for x in anchor
        ]
      )
      leaves = [
        np.asarray(x).view(like.dtype).reshape(like.shape)
        for x, like in zip(data, likes, strict=True)
      ]
      self._known = header["round"], jax.tree.unflatten(treedef, leaves)
    # Processes may encode other bits, as programs of GPUs can have been tuned
    # apart: each knows its contribution by its own digest.
    counted = {self.name: own} if header["is_counted"] else {}
    agreed = Agreed(*self._known, (), header["checksum"], counted)
    return agreed, own if header["is_refused"] else ""


def _send_header(header: dict[str, Any]) -> dict[str, Any]:
  """Returns the header of the first process, in all of them."""
  text = json.dumps(header).encode().ljust(_HEADER_BYTES)
  sent = multihost_utils.broadcast_one_to_all(np.frombuffer(text, np.uint8))
  return json.loads(np.asarray(sent).tobytes())
