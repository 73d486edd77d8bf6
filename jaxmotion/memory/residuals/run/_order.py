"""Orders the steps of a backward pass so that little waits in memory."""

import heapq
import itertools
from collections.abc import Collection, Sequence

from jaxmotion import program
from jaxmotion.memory.residuals import trace
from jaxmotion.program import Step, Value

# A reader after at most so many further products comes soon: what it reads may
# be computed again for it without keeping much in memory.
_SOON = 2


def order_backward(
  joint: trace.JointProgram, known: Collection[Value]
) -> list[Step]:
  """Returns the steps of the backward pass in the order in which they run."""
  return _Reordering(_run_small_first(joint), joint, known).run_freeing_first()


def _run_small_first(joint: trace.JointProgram) -> list[Step]:
  """Returns the backward steps, those of small results before large ones."""
  # Steps that end a fusion and read the same value of the backward pass may run
  # in any order. Each one's operands are recomputed for it and are gone
  # afterwards, while its result stays: the largest result comes last. In an
  # attention, the gradient of the values runs before that of the probabilities.
  steps = joint.backward_steps()
  nbytes = [trace.count_bytes(step.outs) for step in steps]
  may_move = [
    trace.is_product(s) and not program.has_effects(s.eqn) for s in steps
  ]
  where = trace.Positions(steps)
  ordered: dict[int, None] = {}
  for i, step in enumerate(steps):
    movable = {
      j
      for v in step.reads
      if may_move[i] and v in joint.backward
      for j in where.readers[v]
      if j > i and may_move[j] and nbytes[j] <= nbytes[i]
      # Its operands exist before this step.
      if all(where.maker.get(v, -1) < i for v in steps[j].reads)
    }
    for j in sorted({i, *movable}, key=lambda j: (nbytes[j], j)):
      ordered[j] = None
  return [steps[i] for i in ordered]


class _Reordering:
  """Steps of a backward pass, of which some move before others."""

  def __init__(
    self,
    steps: Sequence[Step],
    joint: trace.JointProgram,
    known: Collection[Value],
  ):
    # known: values that are in memory when the pass begins.
    self._steps, self._joint, self._known = steps, joint, known
    self._where = trace.Positions(steps)
    self._ordered: dict[int, None] = {}  # Positions of steps, in their order.

  def run_freeing_first(self) -> list[Step]:
    """Runs first, of readers of a large result, those that free more memory."""
    # A gated layer has two factors. The gradient of one follows from both
    # factors, and that of the other from one: the first takes the place of a
    # factor, if it is computed before the second.
    for i, step in enumerate(self._steps):
      if i not in self._ordered and not trace.is_product(step):
        for value in step.reads:
          maker = self._where.maker.get(value)
          if maker is not None and trace.is_product(self._steps[maker]):
            self._ordered.update(dict.fromkeys(self._list_freeing(value)))
      self._ordered[i] = None
    return [self._steps[i] for i in self._ordered]

  def _list_freeing(self, factor_ct: Value) -> list[int]:
    """Returns the steps that should run before other readers of a cotangent."""
    # factor_ct: cotangent of the product of both factors, just computed.
    steps, where = self._steps, self._where
    waiting = [j for j in where.readers[factor_ct] if j not in self._ordered]
    if len(waiting) < 2 or any(trace.is_product(steps[j]) for j in waiting):
      return []
    cheap = self._list_cheap(waiting)
    results = [
      v
      for j in cheap
      for v in steps[j].outs
      if v.nbytes >= factor_ct.nbytes
      and any(trace.is_product(steps[k]) for k in where.readers[v])
    ]
    if len(results) != 2 or not all(j in cheap for j in waiting):
      return []
    chains = [self._list_chain(v, cheap) for v in results]
    sources = [self._list_sources(chain) for chain in chains]
    if not sources[0] < sources[1]:
      return []
    earlier = {-1, *self._ordered, *chains[1]}
    products = [
      j
      for j in where.readers[results[1]]
      if trace.is_product(steps[j])
      and not program.has_effects(steps[j].eqn)
      and all(where.maker.get(v, -1) in earlier for v in steps[j].reads)
    ]
    return [*chains[1], *products]

  def _list_cheap(self, first: Sequence[int]) -> dict[int, None]:
    """Returns the cheap steps that may run right after the ordered ones."""
    # They are some first steps and those that follow from these.
    cheap: dict[int, None] = {}
    todo = sorted(first)
    # Positions grow along a chain: each step is seen after its operands.
    while todo:
      position = heapq.heappop(todo)
      step = self._steps[position]
      if (
        position in cheap
        or trace.is_product(step)
        or program.has_effects(step.eqn)
      ):
        continue
      makers = [self._where.maker.get(v) for v in step.reads]
      if all(k is None or k in self._ordered or k in cheap for k in makers):
        cheap[position] = None
        for value in step.outs:
          for reader in self._where.readers[value]:
            heapq.heappush(todo, reader)
    return cheap

  def _list_chain(self, result: Value, among: dict[int, None]) -> list[int]:
    """Returns the positions of the steps, of some, that lead to a value."""
    chain: set[int] = set()
    todo = [result]
    while todo:
      position = self._where.maker.get(todo.pop())
      if position in among and position not in chain:
        chain.add(position)
        todo += self._steps[position].reads
    return sorted(chain)

  def _list_sources(self, chain: Sequence[int]) -> set[Value]:
    """Returns the saved values that some steps follow from."""
    reads = [v for j in chain for v in self._steps[j].reads]
    forward = [v for v in reads if v not in self._joint.backward]
    known = dict.fromkeys(self._known)
    rerun = self._joint.order.leading_to(forward, known)
    return {*forward, *(v for s in rerun for v in s.reads)} & known.keys()


def list_fused_reads(
  steps: Sequence[Step], first: int
) -> tuple[list[Value], list[Value]]:
  """Returns what a step and those after it read until a fusion ends."""
  # Returns all values that are read, and those that a product, which ends the
  # fusion and begins none, reads from memory as they are.
  fused_reads: list[Value] = []
  for step in itertools.islice(steps, first, None):
    if trace.is_product(step):
      own_reads = list(step.reads)
      return (fused_reads, []) if fused_reads else (own_reads, own_reads)
    fused_reads += step.reads
  return fused_reads, []


def find_waiting(steps: Sequence[Step]) -> set[Value]:
  """Returns cheap results that a barrier should tie: they are read late."""
  # A compiler fuses a cheap step into its readers. Where the reader comes much
  # later, what the step is computed from stays in memory until then: for the
  # gradient of a skip connection, a slice, that of the whole concatenation.
  made_after: dict[Value, int] = {}  # Products that ran before a cheap result.
  waiting: set[Value] = set()
  written: set[Value] = set()
  products = 0
  for step in steps:
    is_product = trace.is_product(step)
    for value in step.reads:
      if value in made_after and value not in written:
        if products - made_after[value] > _SOON:
          waiting.add(value)
        elif is_product:
          written.add(value)
    products += is_product
    if not is_product:
      most = max((v.nbytes for v in step.reads), default=0)
      made_after.update((v, products) for v in step.outs if v.nbytes <= most)
  return waiting
