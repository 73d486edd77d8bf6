"""Peak memory of a program whose kernels run in order."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxmotion.perfmodel.cost._fusion import KernelStep
from jaxmotion.perfmodel.cost._ops import is_fusible
from jaxmotion.perfmodel.cost._trace import CountedProgram
from jaxmotion.program import LOOPS, Value, writes_in_place


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
    self._alive = sum(_device_bytes(v) for v in program.inputs)
    self.peak_bytes = self._alive

  def run_kernel(self, index: int, own_bytes: int) -> None:
    """Accounts for one kernel.

    Args:
      index: position of the kernel.
      own_bytes: bytes that the kernel needs besides operands and results.
    """
    step = self._steps[index]
    name = step.node.name
    freed_values = {v for v in step.reads if self._last.get(v) == index}
    freed = sum(_device_bytes(v) for v in freed_values)
    made = sum(_device_bytes(v) for v in step.node.outs)
    reuses = (
      is_fusible(step.node) or writes_in_place(step.node.name) or name in LOOPS
    )
    reused = min(freed, made) if reuses else 0
    self._alive += made - reused
    self.peak_bytes = max(self.peak_bytes, self._alive + own_bytes)
    # Results that no kernel reads are freed at once.
    lost = sum(
      _device_bytes(v) for v in step.node.outs if self._last.get(v) == index
    )
    self._alive -= freed - reused + lost


def _device_bytes(value: Value) -> int:
  """Returns the bytes of an array on the device, 0 if the host holds it."""
  space = getattr(value.aval, "memory_space", None)
  return 0 if space == jax.memory.Space.Host else value.nbytes
