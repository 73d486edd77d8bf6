"""Searches the codecs of the shortest step within an error budget.

Dynamic programming over the tensors in the order in which their gradients
appear. A label is a choice of codecs for the tensors so far. It has its error,
its sums in the bucket that is still open, and the state of its pipeline.

Invariant: every label is a choice within the budget, which codecs without
error can complete. While labels are few, they are all such choices: the search
is exhaustive. Of many, the fastest is kept for each pair of (cell of the error,
set of collectives in the open bucket). It is a knapsack whose weights are
rounded. The set of collectives belongs to the pair because the first payload of
a kind pays the latency of that collective for all that follow. A label that has
paid looks slower than one that has yet to pay.

A label is as fast as the step that it becomes when a reference choice codes
all later tensors. The state of the pipeline alone would not rank labels: which
transfers are hidden depends on what follows.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jaxmotion.planner.exchange import _table

# Up to this many labels are all kept.
_EXHAUSTIVE_LABELS = 4096
# Cells of the error budget once there are more labels.
_ERROR_CELLS = 256
# Steps are equally long if they differ by less than this share of the
# reference's step.
EQUAL = 1e-9


class _Labels(NamedTuple):
  """Choices for the tensors so far; the first axis of each array is the label.

  Attributes:
    error: float64[labels], squared error.
    coding_s: float64[labels, 3], sums over the open bucket.
    payload: float64[labels, kinds], sums over the open bucket.
    state: pipeline before the open bucket.
  """

  error: np.ndarray
  coding_s: np.ndarray
  payload: np.ndarray
  state: _table.PipelineState


@dataclasses.dataclass(frozen=True, eq=False)
class _Search:
  """Costs and errors of every codec on every tensor, and the error budget.

  Attributes:
    table: seconds of each codec on each tensor.
    errors: float64[tensors, codecs], squared; infinite where a codec must not
      be used. Every tensor has a codec without error.
    budget: largest sum of squared errors.
    resolution: seconds below which two steps are equally long.
  """

  table: _table.StepTable
  errors: np.ndarray
  budget: float
  resolution: float

  def extend_labels(
    self, labels: _Labels, tensor: int
  ) -> tuple[_Labels, np.ndarray, np.ndarray]:
    """Returns every label with every affordable codec of one more tensor."""
    # Returns the labels, int[labels] positions of their parents, and
    # int[labels] codecs of the tensor.
    error = labels.error[:, None] + self.errors[tensor]
    parents, options = np.nonzero(error <= self.budget)
    old = _select_labels(labels, parents)
    extended = _Labels(
      error[parents, options],
      old.coding_s + self.table.coding_s[tensor, options],
      old.payload + self.table.payload[tensor, options],
      old.state,
    )
    return extended, parents, options

  def prune_labels(self, labels: _Labels, total: np.ndarray) -> np.ndarray:
    """Returns the positions of the labels to keep."""
    # `total`: float64[labels], seconds of the step completed by the reference.
    if len(total) <= _EXHAUSTIVE_LABELS:
      return np.arange(len(total))
    cells_per_error = _ERROR_CELLS / self.budget if self.budget else 0.0
    cell = (labels.error * cells_per_error).astype(int)
    # Each group is a cell of the error and a bit mask of collectives in use.
    bits = 1 << np.arange(labels.payload.shape[-1])
    group = cell * (2 * bits[-1]) + (labels.payload > 0) @ bits
    order = self.rank_steps(total, labels.error)
    return order[np.unique(group[order], return_index=True)[1]]

  def rank_steps(self, total: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Returns positions, fastest first; of equally fast ones the most exact."""
    return np.lexsort((error, np.floor(total / self.resolution)))

  def improve_choice(self, choice: np.ndarray) -> np.ndarray:
    """Changes one tensor at a time until no change makes the step shorter."""
    # A codec that does not shorten the step is replaced by the most exact one.
    # Pruning may lose such local improvements, because labels were ranked by
    # the reference's later codecs and not by those that were chosen.
    every = np.arange(len(choice))
    while True:
      old = choice.copy()
      for tensor, own_errors in enumerate(self.errors):
        others = self.errors[every, choice].sum() - own_errors[choice[tensor]]
        options = np.flatnonzero(others + own_errors <= self.budget)
        # Rounding of the sums can exclude even the codec chosen, which just
        # fits.
        if len(options) == 0:
          continue
        changed = np.tile(choice, (len(options), 1))
        changed[:, tensor] = options
        total = self.table.step_seconds(changed)
        choice[tensor] = options[self.rank_steps(total, own_errors[options])[0]]
      if (choice == old).all():
        return choice


def search_choice(
  table: _table.StepTable,
  errors: np.ndarray,
  budget: float,
  reference: np.ndarray,
) -> np.ndarray:
  """Returns the choice of the shortest step, of equal steps the most exact."""
  # `errors`, `budget`: as of `_Search`.
  # `reference`: int[tensors], choice that completes the labels.
  # Returns int[tensors], a codec for each tensor.
  resolution = EQUAL * table.total_seconds(reference)
  search = _Search(table, errors, budget, resolution)
  labels = _Labels(
    np.zeros(1),
    np.zeros((1, 3)),
    np.zeros((1, table.payload.shape[-1])),
    _table.init_pipeline(1),
  )
  suffixes = _reference_suffixes(table, reference)
  # For each tensor, the parent label and the codec of each label kept.
  history: list[tuple[int, np.ndarray, np.ndarray]] = []
  for number, bucket in enumerate(table.schedule.buckets):
    gap_s, suffix = table.schedule.gaps_s[number], suffixes[number]
    for position, tensor in enumerate(bucket):
      labels, parents, options = search.extend_labels(labels, tensor)
      later = np.array(bucket[position + 1 :], int)
      later_coding_s, later_payload = table.sum_costs(later, reference)
      stage = table.stage_times(
        gap_s, labels.coding_s + later_coding_s, labels.payload + later_payload
      )
      total = _table.finish_time(
        _table.advance_pipeline(labels.state, stage), suffix
      )
      kept = search.prune_labels(labels, total)
      history.append((tensor, parents[kept], options[kept]))
      labels = _select_labels(labels, kept)
    stage = table.stage_times(gap_s, labels.coding_s, labels.payload)
    labels = labels._replace(
      coding_s=0 * labels.coding_s,
      payload=0 * labels.payload,
      state=_table.advance_pipeline(labels.state, stage),
    )
  total = _table.finish_time(labels.state, suffixes[-1])
  best = int(search.rank_steps(total, labels.error)[0])
  choice = np.zeros_like(reference)
  for tensor, parents, options in reversed(history):
    choice[tensor] = options[best]
    best = parents[best]
  return search.improve_choice(choice)


def _reference_suffixes(
  table: _table.StepTable, reference: np.ndarray
) -> list[_table.PipelineSuffix]:
  """Returns for each bucket the times of the buckets that are sent after it."""
  # reference: the codecs of these later buckets. A search from the first bucket
  # on adds their times, to know what a delay costs in the end.
  schedule = table.schedule
  suffixes = [table.last_suffix()]
  for bucket in reversed(range(1, len(schedule.buckets))):
    costs = table.sum_costs(np.array(schedule.buckets[bucket]), reference)
    stage = table.stage_times(schedule.gaps_s[bucket], *costs)
    suffixes.append(_table.prepend_stage(stage, suffixes[-1]))
  return suffixes[::-1]


def _select_labels(labels: _Labels, positions: np.ndarray) -> _Labels:
  """Returns some of the labels; one may be taken several times."""
  selected: _Labels = jax.tree.map(lambda a: a[positions], labels)
  return selected
