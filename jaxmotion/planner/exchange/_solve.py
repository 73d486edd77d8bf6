"""Solves an `ExchangeProblem` and assembles its plan.

Whether a tensor is summed changes what others cost: between two workers small
sums join the collective of what is not summed. The search needs costs that add
up, so each regime has a table of its own. The regimes are sums alone, sums
beside gathered payloads, and sums beside payloads exchanged in two phases. The
best choice of each table and the best single codec are then predicted by
`perfmodel.predict_step` itself; the shortest of these steps is the plan.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxmotion import codecs, core, perfmodel
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives.extend import choose_methods
from jaxmotion.planner import _text
from jaxmotion.planner.exchange import _plan, _problem, _search, _table


class _Solution(NamedTuple):
  """A choice of codecs, int[tensors], its step, and the table it is from."""

  step: perfmodel.StepPrediction
  choice: np.ndarray
  method: str | None
  table: _table.StepTable


def solve_exchange(problem: _problem.ExchangeProblem) -> _plan.ExchangePlan:
  """Returns the plan of the shortest step within the error budget."""
  return _Solver(problem).make_plan()


class _Solver:
  """Candidate solutions of one problem, and the reasons of the best one."""

  def __init__(self, problem: _problem.ExchangeProblem):
    self._problem = problem
    costs, candidates = _table.TensorCosts(problem), problem.candidates
    # The table of sums alone, then those of sums beside others.
    self._tables = [_table.make_table(costs, candidates, "gather", mixed=False)]
    if not all(codec.summable for codec in candidates):
      self._tables += [
        _table.make_table(costs, candidates, method, mixed=True)
        for method in ("two_phase", "gather")
      ]
    self._uniform_s = self._predict_uniform()
    self._uncompressed = problem.predict_step(None, None)

  def make_plan(self) -> _plan.ExchangePlan:
    """Returns the plan of the best solution, of equal ones the most exact."""
    problem = self._problem
    best = min(
      self._list_solutions(),
      key=lambda s: (s.step.total_s, problem.errors.total_error(s.choice)),
    )
    return _plan.ExchangePlan(
      self._explain_plan(best),
      tuple(self._list_tensor_choices(best)),
      self._combine_codecs(best.choice),
      best.method,
      best.step,
      self._uncompressed,
      dict(zip(problem.candidates, self._uniform_s.tolist(), strict=True)),
      problem.errors.total_error(best.choice),
      problem,
    )

  def _predict_uniform(self) -> np.ndarray:
    """Returns float64[codecs], seconds of the step with one codec for all."""
    seconds = np.full(len(self._problem.candidates), np.inf)
    alone, *mixed = self._tables
    for table in mixed:
      used = table.usable
      total_s = table.step_seconds(self._uniform_choices(table))
      seconds[used] = np.minimum(seconds[used], total_s)
    # If one summed codec is used for all tensors, no sum joins anything else:
    # the table of sums alone is right and replaces the other figures.
    seconds[alone.usable] = alone.step_seconds(self._uniform_choices(alone))
    return seconds

  def _uniform_choices(self, table: _table.StepTable) -> np.ndarray:
    """Returns int[codecs, tensors], each codec of a table for all tensors."""
    tensors = len(self._problem.errors.norms)
    return np.repeat(table.usable[:, None], tensors, 1)

  def _list_solutions(self) -> Iterator[_Solution]:
    """Yields the best choice and the best single codec of each table."""
    problem = self._problem
    for table in self._tables:
      affordable = filter(problem.is_affordable, self._uniform_choices(table))
      reference = min(affordable, key=lambda c: self._uniform_s[c[0]])
      errors, limit = problem.squared_limits
      is_usable = np.isin(np.arange(len(self._uniform_s)), table.usable)
      errors = np.where(is_usable, errors, np.inf)
      searched = _search.search_choice(table, errors, limit, reference)
      if table is not self._tables[0] and problem.workers == 2:
        searched = self._include_unsummed(table, searched)
      for choice in np.unique([searched, reference], axis=0):
        codec = self._combine_codecs(choice)
        # No method, where the exchange chooses the same one by itself.
        default = self._tensor_methods(codec, None)
        is_default = default == self._tensor_methods(codec, table.method)
        method = None if is_default else table.method
        step = problem.predict_step(codec, method)
        yield _Solution(step, choice, method, table)

  def _include_unsummed(
    self, table: _table.StepTable, choice: np.ndarray
  ) -> np.ndarray:
    """Returns the choice, or its best change that does not sum everything."""
    # Between two workers small sums are cheaper if they join what is not
    # summed. A search of a mixed table may therefore find sums alone, for which
    # its figures do not hold.
    problem = self._problem
    unsummed = np.flatnonzero([not c.summable for c in problem.candidates])
    if np.isin(choice, unsummed).any():
      return choice
    changed = np.repeat(choice[None], len(choice) * len(unsummed), 0)
    tensors = np.repeat(np.arange(len(choice)), len(unsummed))
    changed[np.arange(len(changed)), tensors] = np.tile(unsummed, len(choice))
    affordable = [*filter(problem.is_affordable, changed)] or [choice]
    changed = np.array(affordable)
    return changed[np.argmin(table.step_seconds(changed))]

  def _combine_codecs(self, choice: np.ndarray) -> codecs.Codec:
    """Returns the codec of the exchange: rules by path, the commonest last."""
    problem = self._problem
    names = [path for path, _ in core.named_leaves(problem.step_cost.params)]
    used = sorted(set(choice.tolist()), key=lambda c: (choice == c).sum())
    *rarer, commonest = (problem.candidates[c] for c in used)
    if not rarer:
      return commonest
    pairs = []
    for c, codec in zip(used, rarer, strict=False):
      paths = (re.escape(names[i]) for i in np.flatnonzero(choice == c))
      pairs.append((f"^({'|'.join(paths)})$", codec))
    return codecs.rules((*pairs, (".*", commonest)))

  def _tensor_methods(
    self, codec: codecs.Codec, method: str | None
  ) -> list[str]:
    """Returns the method by which an exchange sends each tensor."""
    groups = partition(codec, self._problem.exchanged_tree())
    methods = choose_methods(groups, self._problem.workers, method)
    by_leaf = {}
    for group, chosen in zip(groups.leaf_groups, methods, strict=True):
      by_leaf.update(dict.fromkeys(group.leaves, chosen))
    return [by_leaf[i] for i in range(len(by_leaf))]

  def _list_tensor_choices(
    self, best: _Solution
  ) -> Iterator[_plan.TensorChoice]:
    """Yields each tensor's codec, and what a change of it would do."""
    problem, choice, table = self._problem, best.choice, best.table
    plain = self._uncompressed
    methods = self._tensor_methods(self._combine_codecs(choice), best.method)
    # If all tensors are summed, one changed tensor is not: it may use any of
    # the mixed tables.
    alone, *mixed = self._tables
    others = (mixed or [alone]) if table is alone else [table]
    leaves = core.named_leaves(problem.step_cost.params)
    for i, (path, leaf) in enumerate(leaves):
      chosen = int(choice[i])
      changed = np.tile(choice, (len(problem.candidates), 1))
      changed[:, i] = np.arange(len(changed))
      total_s = np.min([other.step_seconds(changed) for other in others], 0)
      # Exact predictions replace those of tables that do not hold for them.
      total_s[(changed == choice).all(1)] = best.step.total_s
      total_s[~changed.any(1)] = plain.total_s
      added_s = total_s - total_s[chosen]
      if chosen:
        reason = _explain_compressed(table, i, chosen, added_s[0])
      else:
        affordable = np.array([problem.is_affordable(c) for c in changed])
        equal_s = _search.EQUAL * total_s[0]
        reason = _explain_uncompressed(problem, i, added_s, affordable, equal_s)
      yield _plan.TensorChoice(
        path,
        leaf.shape,
        problem.candidates[chosen],
        methods[i],
        dict(zip(plain.axis_bytes, table.axis_bytes(i, chosen), strict=True)),
        problem.errors.relative_error(i, chosen),
        reason,
      )

  def _explain_plan(self, best: _Solution) -> str:
    """Says what a plan does to the step."""
    problem, step, plain = self._problem, best.step, self._uncompressed
    if problem.workers == 1 and problem.devices is None:
      return "Do not compress: one worker has nobody to exchange with."
    if best.choice.any():
      source = "measured" if problem.errors.is_measured else "at most"
      size = _text.format_bytes
      full = plain.axis_bytes
      places = _text.name_places(full, "on the wire")
      wire = ", ".join(
        f"{size(step.axis_bytes[axis])} {place} instead of {size(nbytes)}"
        for place, (axis, nbytes) in zip(places, full.items(), strict=True)
      )
      return (
        f"Compress {np.count_nonzero(best.choice)} of {len(best.choice)} "
        f"tensors: {_text.format_seconds(step.total_s)} a step instead of "
        f"{_text.format_seconds(plain.total_s)}, {wire}, with an error of "
        f"{problem.errors.total_error(best.choice):.2g} ({source})."
      )
    start = (
      f"Do not compress: the step takes {_text.format_seconds(plain.total_s)}, "
      f"of which the exchange adds {_text.format_seconds(plain.exposed_s)}"
    )
    affordable = [
      c
      for c in range(1, len(self._uniform_s))
      if problem.is_affordable(np.full_like(best.choice, c))
    ]
    if not affordable:
      return f"{start}, and no codec's error fits in the budget."
    fastest = min(affordable, key=lambda c: self._uniform_s[c])
    name = _text.format_codec(problem.candidates[fastest])
    seconds = _text.format_seconds(self._uniform_s[fastest])
    return f"{start}; with {name} it would take {seconds}."


def _explain_compressed(
  table: _table.StepTable, tensor: int, codec: int, saved_s: float
) -> str:
  """Says what the codec of a compressed tensor saves."""
  # Over the slowest axis: inside of a host nothing is compressed.
  sent, full = (table.axis_bytes(tensor, c)[0] for c in (codec, 0))
  coding_s = float(table.coding_s[tensor, codec].sum())
  coding = f"for {_text.format_seconds(coding_s)} of coding"
  if sent >= full:
    return f"Saves {_text.format_seconds(saved_s)} by fewer messages, {coding}."
  return (
    f"Saves {_text.format_seconds(saved_s)}: {_text.format_bytes(sent)} "
    f"instead of {_text.format_bytes(full)}, {coding}."
  )


def _explain_uncompressed(
  problem: _problem.ExchangeProblem,
  tensor: int,
  added_s: np.ndarray,
  affordable: np.ndarray,
  equal_s: float,
) -> str:
  """Says what the best codec would do to a tensor at full precision."""
  others = np.arange(1, len(added_s))
  if not len(others):
    return "There is no other codec."
  best = others[np.argmin(added_s[others])]
  name = _text.format_codec(problem.candidates[best])
  if added_s[best] < -equal_s and not affordable[best]:
    error = problem.errors.relative_error(tensor, int(best))
    return (
      f"{name} would save {_text.format_seconds(-added_s[best])}, but its "
      f"error of {error:.2g} does not fit in the budget."
    )
  within_budget = others[affordable[others]]
  if len(within_budget):
    best = within_budget[np.argmin(added_s[within_budget])]
    name = _text.format_codec(problem.candidates[best])
  if added_s[best] <= equal_s:
    return f"No codec makes the step shorter; {name} is as long."
  return (
    f"{name} would make the step {_text.format_seconds(added_s[best])} longer."
  )
