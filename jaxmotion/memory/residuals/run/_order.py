"""Orders the steps of a backward pass so that little waits in memory."""

import heapq
import itertools
from collections.abc import Collection, Container, Sequence

from jaxmotion import program
from jaxmotion.memory.residuals import trace
from jaxmotion.program import Step, Value

# Fusions that may end before a reader comes.
_SOON = 2


def order_backward(
  joint: trace.JointProgram, known: Collection[Value]
) -> list[Step]:
  """Returns the steps of the backward pass in the order in which they run."""
  return _run_freeing_first(_run_small_first(joint), joint, known)


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
  found: dict[int, None] = {}
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
      found[j] = None
  return [steps[i] for i in found]


def _run_freeing_first(
  steps: Sequence[Step], joint: trace.JointProgram, known: Collection[Value]
) -> list[Step]:
  """Runs first, of the steps that read a large result, those that free more."""
  # A gated layer has two factors. The gradient of one follows from both
  # factors, and that of the other from one: the first takes the place of a
  # factor, if it is computed before the second.
  where = trace.Positions(steps)
  found: dict[int, None] = {}
  for i, step in enumerate(steps):
    if i not in found and not trace.is_product(step):
      for root in step.reads:
        if root in where.maker and trace.is_product(steps[where.maker[root]]):
          first = _list_freeing(joint, where, root, found, known)
          found.update(dict.fromkeys(first))
    found[i] = None
  return [steps[i] for i in found]


def _list_freeing(
  joint: trace.JointProgram,
  where: trace.Positions,
  root: Value,
  done: dict[int, None],
  known: Collection[Value],
) -> list[int]:
  """Returns the steps to run before other readers of a value do."""
  steps = where.steps
  waiting = [j for j in where.readers[root] if j not in done]
  if len(waiting) < 2 or any(trace.is_product(steps[j]) for j in waiting):
    return []
  cheap = _list_cheap(where, waiting, done)
  results = [
    v
    for j in cheap
    for v in steps[j].outs
    if v.nbytes >= root.nbytes
    and any(trace.is_product(steps[k]) for k in where.readers[v])
  ]
  if len(results) != 2 or not all(j in cheap for j in waiting):
    return []
  chains = [_list_chain(where, v, cheap) for v in results]
  sources = [_list_sources(joint, where, chain, known) for chain in chains]
  if not sources[0] < sources[1]:
    return []
  made = {-1, *done, *chains[1]}
  ends = [
    j
    for j in where.readers[results[1]]
    if trace.is_product(steps[j])
    and not program.has_effects(steps[j].eqn)
    and all(where.maker.get(v, -1) in made for v in steps[j].reads)
  ]
  return [*chains[1], *ends]


def _list_cheap(
  where: trace.Positions, first: Sequence[int], done: Container[int]
) -> dict[int, None]:
  """Returns the positions of cheap steps that may follow some steps at once."""
  cheap: dict[int, None] = {}
  todo = list(first)
  heapq.heapify(todo)
  # Positions grow along a chain: each step is seen after its operands.
  while todo:
    position = heapq.heappop(todo)
    step = where.steps[position]
    if (
      position in cheap
      or trace.is_product(step)
      or program.has_effects(step.eqn)
    ):
      continue
    made_by = [where.maker[v] for v in step.reads if v in where.maker]
    if all(k in done or k in cheap for k in made_by):
      cheap[position] = None
      for value in step.outs:
        for reader in where.readers[value]:
          heapq.heappush(todo, reader)
  return cheap


def _list_chain(
  where: trace.Positions, result: Value, among: Container[int]
) -> list[int]:
  """Returns the positions of the steps, of some, that lead to a value."""
  chain: set[int] = set()
  todo = [result]
  while todo:
    position = where.maker.get(todo.pop())
    if position is None or position in chain:
      continue
    if position in among:
      chain.add(position)
      todo += where.steps[position].reads
  return sorted(chain)


def _list_sources(
  joint: trace.JointProgram,
  where: trace.Positions,
  chain: Sequence[int],
  known: Collection[Value],
) -> set[Value]:
  """Returns the saved values that some steps follow from."""
  reads = [v for j in chain for v in where.steps[j].reads]
  wanted = [v for v in reads if v not in joint.backward]
  rerun = joint.order.leading_to(wanted, dict.fromkeys(known))
  return {
    v for v in (*wanted, *(v for s in rerun for v in s.reads)) if v in known
  }


def list_fused_reads(
  steps: Sequence[Step], first: int
) -> tuple[list[Value], list[Value]]:
  """Returns what a step and those after it read until a fusion ends."""
  # Returns all values that are read, and those that the end of the fusion
  # reads.
  found: list[Value] = []
  for step in itertools.islice(steps, first, None):
    if trace.is_product(step):
      reads = list(step.reads)
      return (found, []) if found else (reads, reads)
    found += step.reads
  return found, []


def find_waiting(steps: Sequence[Step]) -> set[Value]:
  """Returns results of cheap steps that are read much later, by fusions."""
  # A compiler fuses a cheap step into its readers. Where the reader comes much
  # later, what the step is computed from stays in memory until then: for the
  # gradient of a skip connection, a slice, that of the whole concatenation.
  made: dict[Value, int] = {}
  waiting: set[Value] = set()
  written: set[Value] = set()
  ended = 0
  for step in steps:
    ends = trace.is_product(step)
    for value in step.reads:
      if value in made and value not in written:
        if ended - made[value] > _SOON:
          waiting.add(value)
        elif ends:
          written.add(value)
    ended += ends
    if not ends:
      most = max((v.nbytes for v in step.reads), default=0)
      made.update((v, ended) for v in step.outs if v.nbytes <= most)
  return waiting
