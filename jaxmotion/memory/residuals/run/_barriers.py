"""Finds what needs no barrier, and no cache, in a backward pass."""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxmotion import program
from jaxmotion.memory.residuals import choose, trace
from jaxmotion.memory.residuals.run import _forward
from jaxmotion.program import Step, Value


class WaitChoice:
  """Finds the residuals that a backward pass need not tie by a barrier."""

  def __init__(
    self,
    selection: choose.Selection,
    residual: Mapping[Value, choose.Residual],
    on_host: Collection[Value],
  ):
    # residual: of each value that has buffers; may grow. on_host: values whose
    # buffers are on the host still; may shrink.
    self._joint, self._residual = selection.joint, residual
    self._on_host = on_host
    self._free = _forward.find_free_to_delay(selection)
    self._forward_steps: set[Step] | None = None

  def _is_written_by_itself(self, value: Value) -> bool:
    """Says whether the forward pass has no barrier behind a value's maker."""
    maker = self._joint.order.maker(value.source)
    return (
      value in self._free
      or value.source in self._joint.outputs
      or (maker is not None and program.is_expensive(maker.eqn))
    )

  def is_free(self, value: Value) -> bool:
    """Says whether a residual needs no tie: it costs no memory without one."""
    residual = self._residual[value]
    return (
      residual.repeats == 1
      and not residual.is_computed
      and value not in self._on_host
      and (value in self._joint.inputs or self._is_written_by_itself(value))
    )

  def reruns_forward(self, steps: Sequence[Step]) -> bool:
    """Says whether the forward pass has run any of some steps."""
    if self._forward_steps is None:
      joint = self._joint
      ends = [*joint.outputs, *self._residual]
      run = joint.order.leading_to(ends, dict.fromkeys(joint.inputs))
      self._forward_steps = set(run)
    return not self._forward_steps.isdisjoint(steps)

  def list_masked(
    self,
    to_decode: Sequence[Value],
    steps: Sequence[Step],
    whole: Collection[Value],
    buffers: Mapping[Value, choose.Buffers],
  ) -> set[Value]:
    """Returns residuals that are combined with a tied zero, and not tied."""
    # These are arrays in memory that only fusions read. A fusion combines an
    # array with a zero that has passed the barrier, which changes no bit. It
    # may then write its result over the array, and reads a slice of a stack
    # where that is: a barrier in between would keep it from both.
    read_whole = {v.source for v in whole} | trace.product_operands(steps)
    return {
      v
      for v in to_decode
      if v not in self._on_host
      and v.source not in read_whole
      and self._is_written_by_itself(v)
      and not self._residual[v].is_computed
      and all(
        jnp.issubdtype(b.dtype, jnp.unsignedinteger)
        for b in jax.tree.leaves(buffers[v])
      )
    }


def find_whole_part(
  joint: trace.JointProgram,
  later: Sequence[Step],
  rerun: Sequence[Step],
  cached: Iterable[Value],
  known: Container[Value],
  always_live: Collection[Value],
) -> list[Value]:
  """Returns what a rerun part reads, or none if a cache saves memory there."""
  # A part is what is computed again together, and all steps of the backward
  # pass that read what follows from it. A cache needs barriers. Where a
  # compiler that is left to itself would hold no more than the cache and what
  # the first product reads, it is left the part as `jax.checkpoint` leaves it a
  # layer.
  # later: steps of the backward pass that have not run. rerun: what the next of
  # them needs. cached: values that the cache would hold.
  made = {v for step in rerun for v in step.outs}
  read_again = {v for step in rerun for v in step.reads if v in known}
  is_there = lambda v: v in made or v in known
  # What each forward value that is read later follows from by cheap steps.
  sources: dict[Value, set[Value]] = {}
  for value in dict.fromkeys(v for step in later for v in step.reads):
    if value not in joint.backward:
      ends = {*joint.find_sources(value, is_there)}
      if all(map(is_there, ends)):
        sources[value] = ends
  beside = set[Value]().union(*(s for s in sources.values() if s & made))
  own = (made | read_again | beside) - {*always_live}
  weights = read_again & {*always_live}
  reads = [v for v, ends in sources.items() if ends & own or ends <= weights]
  if not all(hasattr(v.aval, "shape") for v in reads):
    return []
  written = trace.product_operands((*rerun, *later))
  held = joint.find_held(reads, written, known)
  there = {v.source for v in cached}
  # Beside large saved values, a compiler may order the products another way.
  saved = beside - made - read_again - {*always_live}
  if choose.SMALL * trace.count_bytes(saved) > trace.count_bytes(there):
    return []
  first = next(
    (s for s in later if trace.is_product(s) and {*s.reads} & {*reads}), None
  )
  if first is not None:
    there |= {v.source for v in first.reads} & held
  return reads if trace.count_bytes(held) <= trace.count_bytes(there) else []
