"""Second thread of a process, which dispatches whatever sends.

XLA:CPU runs the programs that one thread has dispatched one after the other. A
collective and independent computations of one program take the sum of their
times. The programs of two threads run beside one another and take the longer of
both times. So a step that overlaps on CPU hosts dispatches from this thread
what sends, and from the caller's thread what computes.

There is one such thread in a process. Two programs that send, of two threads,
could run in another order on another host and then wait for each other. The
thread only dispatches. It never waits for other hosts, so that an error or the
end of the process does not wait for it.
"""

import concurrent.futures
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmotion import core
from jaxmotion.core import AxisName

OVERLAPS = (None, "program", "thread")


class Sender:
  """Dispatches programs that send, from the second thread of this process."""

  def __init__(self, mesh: Mesh, queue: int = 0):
    # 0, or the number of another thread, which may only send over connections
    # that no other queue uses.
    self._queue = queue
    # This process has one CPU device of the mesh.
    own = Mesh(_own_devices(mesh)[:1], ("own",))
    # JAX refuses arrays of one device in a function that it compiles under
    # `jax.set_mesh` of several, but takes a function that is compiled already.
    with jax.set_mesh(own):
      self._start = jax.device_put(np.int32(0), own.devices[0])
      follow = jax.jit(lambda token: token + 1)
      self._follow = follow.lower(self._start).compile()

  def send(self, program: Callable[..., Any], *args: Any) -> Any:
    """Returns a program's results: arrays that may not be computed yet."""
    # A program runs after everything that the calling thread had dispatched
    # before, which may send too, and after what any `Sender` had dispatched.
    # What the calling thread dispatches later, and does not depend on its
    # results, may run beside it, and so must not send.
    # The token is computed after all that this thread has dispatched so far.
    token = self._follow(self._start)

    def dispatch() -> Any:
      self._follow(token)
      return program(*args)

    return _start_thread(self._queue).submit(dispatch).result()


@functools.cache
def _start_thread(queue: int) -> concurrent.futures.ThreadPoolExecutor:
  name = f"jaxmotion-sender-{queue}"
  return concurrent.futures.ThreadPoolExecutor(1, name)


def choose_overlap(mesh: Mesh, axis_name: AxisName, overlap: str | None) -> str:
  """Returns how a step hides its exchange: "program" or "thread"."""
  own = _own_devices(mesh)
  workers = math.prod(mesh.shape[name] for name in core.axis_names(axis_name))
  refusal = None
  if len(own) > 1:
    refusal = f"a process with several devices, got 'thread' for {len(own)}"
  elif mesh.size > workers:
    refusal = (
      f"a model that is sharded over processes, got 'thread' for {mesh.size} "
      f"devices of {workers} workers"
    )
  if overlap == "thread" and refusal is not None:
    raise ValueError(f"`overlap` must be 'program' for {refusal}.")
  if overlap is not None:
    return overlap
  has_hosts = mesh.size > 1 and own[0].platform == "cpu"
  return "thread" if has_hosts and refusal is None else "program"


def _own_devices(mesh: Mesh) -> list[jax.Device]:
  process = jax.process_index()
  return [d for d in mesh.devices.flat if d.process_index == process]
