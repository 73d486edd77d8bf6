"""Peak memory of a program whose kernels run in order."""

from collections.abc import Iterable, Iterator, Sequence

import jax

from jaxmotion import core
from jaxmotion.perfmodel import _fusion, _ops
from jaxmotion.program import Step, Value, writes_in_place


class Liveness:
  """Bytes of a program's arrays that are alive while its kernels run.

  Arguments stay, and results stay once they are made. A temporary is freed
  after the last kernel that reads it. An elementwise kernel, one that
  updates part of an array, and a loop that carries one may write to a temporary
  freed there. Arrays in host memory do not count.

  A compiler makes arrays of one shape in one kernel if they follow from next to
  nothing. Examples are masks of all layers and the constants that loops begin
  with. All of them are alive from where the first one is needed. A loop writes
  its results over those.
  """

  def __init__(
    self, program: _ops.CountedProgram, steps: Sequence[_fusion.KernelStep]
  ):
    self._steps = steps
    stays = {v.source for v in program.outputs if v is not None}
    stays.update(program.inputs)
    self._last: dict[Value, int] = {}
    for index, step in enumerate(steps):
      for value in (*step.reads, *step.node.outs):
        if value not in stays:
          self._last[value] = index
    self._find_early(program.uniform)
    held = (v for v in program.inputs if v not in program.remade)
    self._alive = _sum_bytes(held)
    self.peak_bytes = self._alive

  def _find_early(self, uniform: frozenset[Value]) -> None:
    """Finds the arrays that are alive before their own kernel runs."""
    # By position, the arrays of later kernels that are made there, too.
    self._made_early: dict[int, list[Value]] = {}
    self._is_early: set[Value] = set()
    # Constants whose place is that of a loop's result.
    self._replaced: set[Value] = set()
    first: dict[tuple[object, ...], int] = {}
    for index, step in enumerate(self._steps):
      node = step.node
      is_source = step.is_source and node.outs[0] not in uniform
      values = list(node.outs) if is_source else []
      if node.name == "scan":
        begun = dict(_list_begun(node, uniform))
        self._replaced.update(v for v in begun.values() if v is not None)
        values = list(begun)
      for value in values:
        key = (node.name, value.dtype, value.shape)
        place = first.setdefault(key, index)
        if place < index:
          self._made_early.setdefault(place, []).append(value)
          self._is_early.add(value)

  def run_kernel(self, index: int, own_bytes: int) -> None:
    """Accounts for one kernel."""
    step = self._steps[index]
    self._alive += _sum_bytes(self._made_early.get(index, ()))
    ended = {v for v in step.reads if self._last.get(v) == index}
    ended -= self._replaced
    freed = _sum_bytes(ended)
    late = self._is_early | self._replaced
    made = _sum_bytes(v for v in step.node.outs if v not in late)
    reused = min(self._count_reusable(step, ended), made)
    self._alive += made - reused
    self.peak_bytes = max(self.peak_bytes, self._alive + own_bytes)
    # Results that no kernel reads are freed at once.
    lost = _sum_bytes(
      v
      for v in step.node.outs
      if self._last.get(v) == index and v not in self._replaced
    )
    self._alive -= freed - reused + lost

  def _count_reusable(self, step: _fusion.KernelStep, freed: set[Value]) -> int:
    """Returns the bytes of freed arrays that a step's results may overwrite."""
    node = step.node
    if node.name == "scan":
      # Only a carry is updated in place: results of the iterations are stacked
      # while the operands of the later ones are still read.
      _, first, count = core.scan_parts(node.params)
      carried = {v.source for v in node.arrays[first : first + count] if v}
      return _sum_bytes(freed & carried)
    is_in_place = node.name == "while" or writes_in_place(node.name)
    return _sum_bytes(freed) if is_in_place or _ops.is_fusible(node) else 0


def list_stacks(node: Step) -> Sequence[Value]:
  """Returns the results of a loop that stack those of its iterations."""
  if node.name != "scan":
    return ()
  _, _, carried = core.scan_parts(node.params)
  return node.outs[carried:]


def _list_begun(
  node: Step, uniform: frozenset[Value]
) -> Iterator[tuple[Value, Value | None]]:
  """Yields results of a loop that begin as constants, and the constants."""
  # Stacks of the iterations' results begin as zeros.
  _, first, count = core.scan_parts(node.params)
  inits = node.arrays[first : first + count]
  for out, init in zip(node.outs, inits, strict=False):
    if init is not None and init.source in uniform:
      yield out, init.source
  for out in list_stacks(node):
    yield out, None


def _sum_bytes(values: Iterable[Value]) -> int:
  """Returns the bytes of arrays on the device; those of the host count 0."""
  host = jax.memory.Space.Host
  spaces = ((v, getattr(v.aval, "memory_space", None)) for v in values)
  return sum(v.nbytes for v, space in spaces if space != host)
