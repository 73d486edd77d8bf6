"""Peak memory of a program whose kernels run in order."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxmotion.core import scan_parts
from jaxmotion.perfmodel.cost._fusion import KernelStep
from jaxmotion.perfmodel.cost._ops import is_fusible
from jaxmotion.perfmodel.cost._trace import CountedProgram
from jaxmotion.program import Value, writes_in_place


class Liveness:
  """Bytes of a program's arrays that are alive while its kernels run.

  Arguments stay, and results stay once they are made. A temporary is freed
  after the last kernel that reads it. An elementwise kernel, one that
  updates part of an array, and a loop that carries one may write to a temporary
  freed there. Arrays in host memory do not count.

  Args:
    program: flat program.
    steps: its kernels in order.
  """

  def __init__(self, program: CountedProgram, steps: Sequence[KernelStep]):
    self._steps = steps
    stays = {v.source for v in program.outputs if v is not None}
    stays.update(program.inputs)
    self._last: dict[Value, int] = {}
    for index, step in enumerate(steps):
      for value in (*step.reads, *step.node.outs):
        if value not in stays:
          self._last[value] = index
    held = (v for v in program.inputs if v not in program.uniform)
    self._alive = sum(map(_device_bytes, held))
    self.peak_bytes = self._alive

  def run_kernel(self, index: int, own_bytes: int) -> None:
    """Accounts for one kernel.

    Args:
      index: position of the kernel.
      own_bytes: bytes that the kernel needs besides operands and results.
    """
    step = self._steps[index]
    freed_values = {v for v in step.reads if self._last.get(v) == index}
    freed = sum(map(_device_bytes, freed_values))
    made = sum(map(_device_bytes, step.node.outs))
    reused = self._count_reused(step, freed_values)
    self._alive += made - reused
    self.peak_bytes = max(self.peak_bytes, self._alive + own_bytes)
    # Results that no kernel reads are freed at once.
    lost = sum(
      _device_bytes(v) for v in step.node.outs if self._last.get(v) == index
    )
    self._alive -= freed - reused + lost

  def _count_reused(self, step: KernelStep, freed: set[Value]) -> int:
    """Returns the bytes of results that are written to temporaries freed."""
    node = step.node
    if node.name == "scan":
      # Only a carry is updated in place: results of the iterations are stacked
      # while the operands of the later ones are still read.
      _, first, count = scan_parts(node.params)
      carried = {v.source for v in node.arrays[first : first + count] if v}
      freed = freed & carried
    elif not (
      is_fusible(node) or writes_in_place(node.name) or node.name == "while"
    ):
      return 0
    made = sum(map(_device_bytes, node.outs))
    return min(sum(map(_device_bytes, freed)), made)


def _device_bytes(value: Value) -> int:
  """Returns the bytes of an array on the device, 0 if the host holds it."""
  space = getattr(value.aval, "memory_space", None)
  return 0 if space == jax.memory.Space.Host else value.nbytes
