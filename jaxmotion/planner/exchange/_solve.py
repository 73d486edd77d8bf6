"""Solves an `ExchangeProblem` and assembles its plan.

Whether a tensor is summed changes what others cost: between two workers small
sums join the collective of what is not summed. The search needs costs that add
up, so each regime has a table of its own. The regimes are sums alone, sums
beside gathered payloads, and sums beside payloads exchanged in two phases. The
best choice of each table and the best single codec are then predicted by
`perfmodel.predict_step` itself; the shortest of these steps is the plan.
"""

from __future__ import annotations

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
  tables = _make_tables(problem)
  uniform_s = _predict_uniform(problem, tables)
  best = min(
    _list_solutions(problem, tables, uniform_s),
    key=lambda s: (s.step.total_s, problem.errors.total_error(s.choice)),
  )
  uncompressed = problem.predict_step(None, None)
  return _plan.ExchangePlan(
    _explain_plan(problem, best.choice, best.step, uncompressed, uniform_s),
    tuple(_list_tensor_choices(problem, tables, best, uncompressed)),
    _combine_codecs(problem, best.choice),
    best.method,
    best.step,
    uncompressed,
    dict(zip(problem.candidates, uniform_s.tolist(), strict=True)),
    problem.errors.total_error(best.choice),
    problem,
  )


def _make_tables(problem: _problem.ExchangeProblem) -> list[_table.StepTable]:
  """Returns the table of sums alone, then those of sums beside others."""
  costs, candidates = _table.TensorCosts(problem), problem.candidates
  tables = [_table.make_table(costs, candidates, "gather", mixed=False)]
  if not all(codec.summable for codec in candidates):
    for method in ("two_phase", "gather"):
      tables.append(_table.make_table(costs, candidates, method, mixed=True))
  return tables


def _predict_uniform(
  problem: _problem.ExchangeProblem, tables: list[_table.StepTable]
) -> np.ndarray:
  """Returns float64[codecs], seconds of the step with one codec for all."""
  seconds = np.full(len(problem.candidates), np.inf)
  for table in tables[1:]:
    found = table.step_seconds(_uniform_choices(problem, table.usable))
    seconds[table.usable] = np.minimum(seconds[table.usable], found)
  # If one summed codec is used for all tensors, no sum joins anything else:
  # the table of sums alone is right and replaces the other figures.
  alone = tables[0]
  choices = _uniform_choices(problem, alone.usable)
  seconds[alone.usable] = alone.step_seconds(choices)
  return seconds


def _uniform_choices(
  problem: _problem.ExchangeProblem, usable: np.ndarray
) -> np.ndarray:
  """Returns int[codecs, tensors], each codec for all tensors."""
  return np.repeat(usable[:, None], len(problem.errors.norms), 1)


def _list_solutions(
  problem: _problem.ExchangeProblem,
  tables: list[_table.StepTable],
  uniform_s: np.ndarray,
) -> Iterator[_Solution]:
  """Yields the best choice and the best single codec of each table."""
  for table in tables:
    choices = _uniform_choices(problem, table.usable)
    affordable = [c for c in choices if problem.is_affordable(c)]
    reference = min(affordable, key=lambda c: uniform_s[c[0]])
    errors, limit = problem.squared_limits
    is_usable = np.isin(np.arange(len(uniform_s)), table.usable)
    errors = np.where(is_usable, errors, np.inf)
    found = _search.search_choice(table, errors, limit, reference)
    if table is not tables[0] and problem.workers == 2:
      found = _include_unsummed(problem, table, found)
    for choice in np.unique([found, reference], axis=0):
      codec = _combine_codecs(problem, choice)
      method = _exchange_method(problem, codec, table.method)
      step = problem.predict_step(codec, method)
      yield _Solution(step, choice, method, table)


def _include_unsummed(
  problem: _problem.ExchangeProblem, table: _table.StepTable, choice: np.ndarray
) -> np.ndarray:
  """Returns the choice, or its best change that does not sum everything."""
  # Between two workers small sums are cheaper if they join what is not summed.
  # A search of a mixed table may therefore find sums alone, for which its
  # figures do not hold.
  unsummed = np.flatnonzero([not c.summable for c in problem.candidates])
  if np.isin(choice, unsummed).any():
    return choice
  changed = np.repeat(choice[None], len(choice) * len(unsummed), 0)
  tensors = np.repeat(np.arange(len(choice)), len(unsummed))
  changed[np.arange(len(changed)), tensors] = np.tile(unsummed, len(choice))
  affordable = [c for c in changed if problem.is_affordable(c)]
  changed = np.array(affordable or [choice])
  return changed[np.argmin(table.step_seconds(changed))]


def _combine_codecs(
  problem: _problem.ExchangeProblem, choice: np.ndarray
) -> codecs.Codec:
  """Returns the codec of the exchange: rules by path, commonest codec last."""
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
  problem: _problem.ExchangeProblem, codec: codecs.Codec, method: str | None
) -> list[str]:
  """Returns the method by which an exchange sends each tensor."""
  groups = partition(codec, problem.exchanged_tree())
  methods = choose_methods(groups, problem.workers, method)
  found = {}
  for group, chosen in zip(groups.leaf_groups, methods, strict=True):
    found.update(dict.fromkeys(group.leaves, chosen))
  return [found[i] for i in range(len(found))]


def _exchange_method(
  problem: _problem.ExchangeProblem, codec: codecs.Codec, method: str | None
) -> str | None:
  """Returns the method, or None if the exchange chooses the same by itself."""
  default = _tensor_methods(problem, codec, None)
  is_default = default == _tensor_methods(problem, codec, method)
  return None if is_default else method


def _list_tensor_choices(
  problem: _problem.ExchangeProblem,
  tables: list[_table.StepTable],
  best: _Solution,
  uncompressed: perfmodel.StepPrediction,
) -> Iterator[_plan.TensorChoice]:
  """Yields each tensor's codec with a reason: what a change of it would do."""
  choice, table = best.choice, best.table
  codec = _combine_codecs(problem, choice)
  methods = _tensor_methods(problem, codec, best.method)
  # If all tensors are summed, one changed tensor is not: it may use any of
  # the mixed tables.
  others = [table] if table is not tables[0] else tables[1:] or tables
  for i, (path, leaf) in enumerate(core.named_leaves(problem.step_cost.params)):
    chosen = int(choice[i])
    changed = np.tile(choice, (len(problem.candidates), 1))
    changed[:, i] = np.arange(len(changed))
    total_s = np.min([other.step_seconds(changed) for other in others], 0)
    # Exact predictions replace those of tables that do not hold for them.
    total_s[(changed == choice).all(1)] = best.step.total_s
    total_s[~changed.any(1)] = uncompressed.total_s
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
      table.wire_bytes(i, chosen),
      problem.errors.relative_error(i, chosen),
      reason,
    )


def _explain_compressed(
  table: _table.StepTable, tensor: int, codec: int, saved_s: float
) -> str:
  """Says what the codec of a compressed tensor saves."""
  sent, full = (table.wire_bytes(tensor, c) for c in (codec, 0))
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


def _explain_plan(
  problem: _problem.ExchangeProblem,
  choice: np.ndarray,
  step: perfmodel.StepPrediction,
  uncompressed: perfmodel.StepPrediction,
  uniform_s: np.ndarray,
) -> str:
  """Says what a plan does to the step."""
  # `choice`: int[tensors], a codec for each tensor.
  # `uniform_s`: float64[codecs], seconds with one codec for all tensors.
  if problem.workers == 1 and problem.devices is None:
    return "Do not compress: one worker has nobody to exchange with."
  if choice.any():
    source = "measured" if problem.errors.is_measured else "at most"
    return (
      f"Compress {np.count_nonzero(choice)} of {len(choice)} tensors: "
      f"{_text.format_seconds(step.total_s)} a step instead of "
      f"{_text.format_seconds(uncompressed.total_s)}, "
      f"{_text.format_bytes(step.wire_bytes)} on the wire "
      f"instead of {_text.format_bytes(uncompressed.wire_bytes)}, with an "
      f"error of {problem.errors.total_error(choice):.2g} ({source})."
    )
  start = (
    "Do not compress: the step takes "
    f"{_text.format_seconds(uncompressed.total_s)}, "
    f"of which the exchange adds {_text.format_seconds(uncompressed.exposed_s)}"
  )
  affordable = [
    c
    for c in range(1, len(uniform_s))
    if problem.is_affordable(np.full_like(choice, c))
  ]
  if not affordable:
    return f"{start}, and no codec's error fits in the budget."
  best = min(affordable, key=lambda c: uniform_s[c])
  name = _text.format_codec(problem.candidates[best])
  return (
    f"{start}; with {name} it would take "
    f"{_text.format_seconds(uniform_s[best])}."
  )
