"""The codecs that make the step shortest within a budget of error.

Dynamic programming over the tensors in the order in which their gradients
appear. A label is a choice of codecs for the tensors so far: its error, its
sums in the bucket that is still open, and its clocks. While there are few, all
are kept and the search is exhaustive; of many, the fastest of each cell of the
error and set of collectives is, as in a knapsack whose weights are rounded.
How fast a label is, is seen by following it with what a reference does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmotion.planner.exchange._pipeline import (
  PipelineState,
  PipelineSuffix,
  advance_pipeline,
  finish_time,
  init_pipeline,
  prepend_stage,
)
from jaxmotion.planner.exchange._table import Table

_FEW = 4096  # Labels that are all kept.
_CELLS = 256  # Of the budget, if there are more.
_EQUAL = 1e-9  # Of the reference's step: differences that are none.


class _Labels(NamedTuple):
  """Choices so far; the first axis of every array is the label.

  Attributes:
    error: squared.
    coding: float64[labels, 3], of the open bucket.
    payload: float64[labels, kinds], of the open bucket.
    clock: before it.
  """

  error: np.ndarray
  coding: np.ndarray
  payload: np.ndarray
  clock: PipelineState


def search(
  table: Table,
  errors: np.ndarray,
  budget: float,
  reference: np.ndarray,
  *,
  few: int = _FEW,
  cells: int = _CELLS,
) -> np.ndarray:
  """Returns the choice of the shortest step, of equal ones the most exact.

  Args:
    table: of every codec on every tensor.
    errors: float64[tensors, codecs], squared; infinite where a codec may not
      be used. One codec of every tensor has none.
    budget: of their sum.
    reference: int[tensors], a choice to compare with.
    few: labels that are all kept.
    cells: of the budget, if there are more.

  Returns:
    int[tensors], a codec for each tensor.
  """
  labels = _Labels(
    np.zeros(1),
    np.zeros((1, 3)),
    np.zeros((1, table.payload.shape[-1])),
    init_pipeline(1),
  )
  unit = _EQUAL * table.total(reference)
  rests = _rests(table, reference)
  steps: list[tuple[int, np.ndarray, np.ndarray]] = []
  for number, bucket in enumerate(table.when.buckets):
    gap, rest = table.when.gaps[number], rests[number]
    for place, tensor in enumerate(bucket):
      labels, parents, options = _extend(table, errors, budget, labels, tensor)
      follow = np.array(bucket[place + 1 :], int)
      parts = table.parts(
        gap,
        labels.coding + table.coding[follow, reference[follow]].sum(0),
        labels.payload + table.payload[follow, reference[follow]].sum(0),
      )
      total = finish_time(advance_pipeline(labels.clock, parts), rest)
      kept = _thin(labels, total, unit, budget, few, cells)
      steps.append((tensor, parents[kept], options[kept]))
      labels = _take(labels, kept)
    clock = advance_pipeline(
      labels.clock, table.parts(gap, labels.coding, labels.payload)
    )
    labels = labels._replace(
      coding=0 * labels.coding, payload=0 * labels.payload, clock=clock
    )
  best = int(
    _order(finish_time(labels.clock, rests[-1]), labels.error, unit)[0]
  )
  found = np.zeros_like(reference)
  for tensor, parents, options in reversed(steps):
    found[tensor] = options[best]
    best = parents[best]
  return _improve(table, errors, budget, found, unit)


def _rests(table: Table, reference: np.ndarray) -> list[PipelineSuffix]:
  """What follows each bucket, with the codecs of a reference."""
  rests = [table.after_all()]
  for number in reversed(range(1, len(table.when.buckets))):
    of = np.array(table.when.buckets[number])
    parts = table.parts(
      table.when.gaps[number],
      table.coding[of, reference[of]].sum(0),
      table.payload[of, reference[of]].sum(0),
    )
    rests.append(prepend_stage(parts, rests[-1]))
  return rests[::-1]


def _extend(
  table: Table, errors: np.ndarray, budget: float, labels: _Labels, tensor: int
) -> tuple[_Labels, np.ndarray, np.ndarray]:
  """Every label with every codec of one more tensor, within the budget."""
  error = labels.error[:, None] + errors[tensor]
  parents, options = np.nonzero(error <= budget)
  old = _take(labels, parents)
  extended = _Labels(
    error[parents, options],
    old.coding + table.coding[tensor, options],
    old.payload + table.payload[tensor, options],
    old.clock,
  )
  return extended, parents, options


def _take(labels: _Labels, which: np.ndarray) -> _Labels:
  clock = PipelineState(*(a[which] for a in labels.clock))
  error, coding, payload = (a[which] for a in labels[:3])
  return _Labels(error, coding, payload, clock)


def _thin(
  labels: _Labels,
  total: np.ndarray,
  unit: float,
  budget: float,
  few: int,
  cells: int,
) -> np.ndarray:
  """The labels to keep."""
  if len(total) <= few:
    return np.arange(len(total))
  cell = (labels.error * (cells / budget if budget else 0.0)).astype(int)
  kinds = 1 << np.arange(labels.payload.shape[-1])
  group = cell * (2 * kinds[-1]) + (labels.payload > 0) @ kinds
  order = _order(total, labels.error, unit)
  return order[np.unique(group[order], return_index=True)[1]]


def _order(total: np.ndarray, error: np.ndarray, unit: float) -> np.ndarray:
  """Fastest first; of those that are equally fast the most exact."""
  return np.lexsort((error, np.floor(total / unit)))


def _improve(
  table: Table,
  errors: np.ndarray,
  budget: float,
  choice: np.ndarray,
  unit: float,
) -> np.ndarray:
  """Changes one tensor at a time until none makes the step shorter.

  What does not make it longer goes back to the most exact.
  """
  while True:
    old = choice.copy()
    for tensor in range(len(choice)):
      others = errors[np.arange(len(choice)), choice].sum()
      others -= errors[tensor, choice[tensor]]
      options = np.flatnonzero(others + errors[tensor] <= budget)
      if len(options) == 0:  # Rounding: what is chosen just fits.
        continue
      changed = np.tile(choice, (len(options), 1))
      changed[:, tensor] = options
      order = _order(table.totals(changed), errors[tensor, options], unit)
      choice[tensor] = options[order[0]]
    if (choice == old).all():
      return choice
