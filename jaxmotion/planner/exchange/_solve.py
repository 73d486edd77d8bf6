"""From a request to a plan."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxmotion.codecs import Codec, rules
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives.extend import choose_methods
from jaxmotion.core import named_leaves
from jaxmotion.perfmodel import StepPrediction
from jaxmotion.planner.exchange._plan import ExchangePlan, TensorChoice
from jaxmotion.planner.exchange._prices import TensorCosts
from jaxmotion.planner.exchange._problem import ExchangeProblem
from jaxmotion.planner.exchange._reasons import plan_reason, tensor_reason
from jaxmotion.planner.exchange._search import search
from jaxmotion.planner.exchange._table import Table, make_table


class _Run(NamedTuple):
  """One way to carry what is encoded.

  Attributes:
    method: for what is not summed.
    table: of every codec on every tensor.
    codecs: those that may be used, as positions.
  """

  method: str
  table: Table
  codecs: np.ndarray


class _Final(NamedTuple):
  """A choice of codecs that a step was predicted for."""

  step: StepPrediction
  choice: np.ndarray
  method: str | None
  run: _Run


def solve(request: ExchangeProblem) -> ExchangePlan:
  """Returns the plan of the shortest step within the budget."""
  runs = _runs(request)
  uniform = _uniform(request, runs)
  final = min(
    _finals(request, runs, uniform),
    key=lambda f: (f.step.total_s, request.errors.total(f.choice)),
  )
  plain = request.step(None, None)
  return ExchangePlan(
    plan_reason(request, final.choice, final.step, plain, uniform),
    tuple(_choices(request, runs, final, plain)),
    _codec(request, final.choice),
    final.method,
    final.step,
    plain,
    dict(zip(request.candidates, uniform.tolist(), strict=True)),
    request.errors.total(final.choice),
    request,
  )


def _runs(request: ExchangeProblem) -> list[_Run]:
  """Sums alone, and sums beside what takes one phase or two."""
  prices = TensorCosts(request.route)

  def table(method: str, mixed: bool) -> Table:
    return make_table(
      request.work, prices, request.candidates, method, mixed=mixed
    )

  summed = np.array([c.summable for c in request.candidates])
  runs = [_Run("gather", table("gather", False), np.flatnonzero(summed))]
  if not summed.all():
    every = np.arange(len(summed))
    for method in ("two_phase", "gather"):
      runs.append(_Run(method, table(method, True), every))
  return runs


def _uniform(request: ExchangeProblem, runs: list[_Run]) -> np.ndarray:
  """Seconds of the step with one codec for all tensors."""
  total = np.full(len(request.candidates), np.inf)
  for run in runs[1:]:
    own = run.table.totals(_same(request, run.codecs))
    total[run.codecs] = np.minimum(total[run.codecs], own)
  # Where all is summed, nothing is beside it.
  alone = runs[0]
  total[alone.codecs] = alone.table.totals(_same(request, alone.codecs))
  return total


def _same(request: ExchangeProblem, codecs: np.ndarray) -> np.ndarray:
  """One choice for each codec: that one everywhere."""
  return np.repeat(codecs[:, None], len(request.errors.norms), 1)


def _finals(
  request: ExchangeProblem, runs: list[_Run], uniform: np.ndarray
) -> Iterator[_Final]:
  """The shortest step of each run, and the shortest with one codec."""
  for run in runs:
    choices = _same(request, run.codecs)
    affordable = [c for c in choices if request.affords(c)]
    reference = min(affordable, key=lambda c: uniform[c[0]])
    errors, limit = request.limits()
    allowed = np.isin(np.arange(len(uniform)), run.codecs)
    errors = np.where(allowed, errors, np.inf)
    found = search(run.table, errors, limit, reference)
    if run is not runs[0] and request.workers == 2:
      found = _with_words(request, run, found)
    for choice in np.unique([found, reference], axis=0):
      codec = _codec(request, choice)
      method = _method(request, codec, run.method)
      yield _Final(request.step(codec, method), choice, method, run)


def _with_words(
  request: ExchangeProblem, run: _Run, choice: np.ndarray
) -> np.ndarray:
  """The choice, or the next one that does not sum everything.

  Between two workers small sums are cheaper beside what is not summed, so
  that a run may well find sums alone, which it has not priced.
  """
  words = np.flatnonzero([not c.summable for c in request.candidates])
  if np.isin(choice, words).any():
    return choice
  changed = np.repeat(choice[None], len(choice) * len(words), 0)
  tensors = np.repeat(np.arange(len(choice)), len(words))
  changed[np.arange(len(changed)), tensors] = np.tile(words, len(choice))
  changed = np.array([c for c in changed if request.affords(c)] or [choice])
  return changed[np.argmin(run.table.totals(changed))]


def _codec(request: ExchangeProblem, choice: np.ndarray) -> Codec:
  """The codec of an exchange: rules by path, the most frequent one last."""
  names = [path for path, _ in named_leaves(request.work.params)]
  used = sorted(set(choice.tolist()), key=lambda c: (choice == c).sum())
  *few, rest = (request.candidates[c] for c in used)
  if not few:
    return rest
  pairs = []
  for c, codec in zip(used, few, strict=False):
    own = (re.escape(names[i]) for i in np.flatnonzero(choice == c))
    pairs.append((f"^({'|'.join(own)})$", codec))
  return rules((*pairs, (".*", rest)))


def _methods(
  request: ExchangeProblem, codec: Codec, method: str | None
) -> list[str]:
  """How each tensor travels."""
  cut = partition(codec, request.exchanged())
  methods = choose_methods(cut, request.workers, method)
  found = {}
  for part, chosen in zip(cut.leaf_groups, methods, strict=True):
    found.update(dict.fromkeys(part.leaves, chosen))
  return [found[i] for i in range(len(found))]


def _method(request: ExchangeProblem, codec: Codec, method: str) -> str | None:
  """None where the exchange chooses the same by itself."""
  own = _methods(request, codec, None)
  return None if own == _methods(request, codec, method) else method


def _choices(
  request: ExchangeProblem,
  runs: list[_Run],
  final: _Final,
  plain: StepPrediction,
) -> Iterator[TensorChoice]:
  choice, table = final.choice, final.run.table
  methods = _methods(request, _codec(request, choice), final.method)
  # From sums alone there are several ways to go.
  others = [final.run] if final.run is not runs[0] else runs[1:] or runs
  for i, (path, leaf) in enumerate(named_leaves(request.work.params)):
    codec = int(choice[i])
    changed = np.tile(choice, (len(request.candidates), 1))
    changed[:, i] = np.arange(len(changed))
    total = np.min([run.table.totals(changed) for run in others], 0)
    total[(changed == choice).all(1)] = final.step.total_s
    total[~changed.any(1)] = plain.total_s
    yield TensorChoice(
      path,
      leaf.shape,
      request.candidates[codec],
      methods[i],
      table.wire_bytes(i, codec),
      request.errors.relative(i, codec),
      tensor_reason(request, table, changed, i, codec, total),
    )
