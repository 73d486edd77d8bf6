"""Limit of the steps that a loop dispatches ahead of emulated devices.

XLA:CPU allows 32 programs in flight on each device. Further ones wait, and on
several devices of one process they wait in the threads that run the programs.
Some devices may have no thread left for the oldest program. Those that have
started it then wait in its collective until a timeout ends the process. So a
loop must not run that far ahead.
"""

import collections

import jax
from jax.sharding import Mesh

from jaxmotion.core import PyTree

# Far below the limit of 32, because a loop may run programs of its own between
# two steps, such as a sum of losses. Fewer steps are slower: the host could not
# prepare the next step during the last.
_MAX_STEPS = 4


class StepsInFlight:
  """Waits before a loop runs too many steps ahead of emulated devices."""

  def __init__(self, mesh: Mesh) -> None:
    process = jax.process_index()
    emulated = [
      device
      for device in mesh.devices.flat
      if device.platform == "cpu" and device.process_index == process
    ]
    # Nothing waits on accelerators, nor on a process with one CPU device.
    self._is_limited = len(emulated) > 1
    self._results: collections.deque[jax.Array] = collections.deque()

  def wait(self, args: PyTree) -> None:
    """Waits until one more step may be dispatched."""
    while len(self._results) >= _MAX_STEPS:
      result = self._results.popleft()
      # Where the caller has deleted the result, the arguments of the next step
      # are waited for instead.
      jax.block_until_ready(args if result.is_deleted() else result)

  def add(self, results: PyTree) -> None:
    """Remembers a step that was dispatched by a result that is not donated."""
    # The first array stands for all.
    for leaf in jax.tree.leaves(results)[:1]:
      if self._is_limited and not isinstance(leaf, jax.core.Tracer):
        self._results.append(leaf)
