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

from __future__ import annotations

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


def search_choice(
  table: _table.StepTable,
  errors: np.ndarray,
  budget: float,
  reference: np.ndarray,
) -> np.ndarray:
  """Returns the choice of the shortest step, of equal steps the most exact."""
  # `errors`: float64[tensors, codecs], squared; infinite where a codec must not
  # be used. Every tensor has a codec without error.
  # `reference`: int[tensors], choice that completes the labels.
  # Returns int[tensors], a codec for each tensor.
  labels = _Labels(
    np.zeros(1),
    np.zeros((1, 3)),
    np.zeros((1, table.payload.shape[-1])),
    _table.init_pipeline(1),
  )
  resolution = EQUAL * table.total_seconds(reference)
  suffixes = _reference_suffixes(table, reference)
  # For each tensor, the parent label and the codec of each label kept.
  history: list[tuple[int, np.ndarray, np.ndarray]] = []
  for number, bucket in enumerate(table.schedule.buckets):
    gap_s, suffix = table.schedule.gaps_s[number], suffixes[number]
    for position, tensor in enumerate(bucket):
      labels, parents, options = _extend_labels(
        table, errors, budget, labels, tensor
      )
      later = np.array(bucket[position + 1 :], int)
      stage = table.stage_times(
        gap_s,
        labels.coding_s + table.coding_s[later, reference[later]].sum(0),
        labels.payload + table.payload[later, reference[later]].sum(0),
      )
      total = _table.finish_time(
        _table.advance_pipeline(labels.state, stage), suffix
      )
      kept = _prune_labels(labels, total, resolution, budget)
      history.append((tensor, parents[kept], options[kept]))
      labels = _select_labels(labels, kept)
    state = _table.advance_pipeline(
      labels.state, table.stage_times(gap_s, labels.coding_s, labels.payload)
    )
    labels = labels._replace(
      coding_s=0 * labels.coding_s, payload=0 * labels.payload, state=state
    )
  total = _table.finish_time(labels.state, suffixes[-1])
  best = int(_rank_labels(total, labels.error, resolution)[0])
  choice = np.zeros_like(reference)
  for tensor, parents, options in reversed(history):
    choice[tensor] = options[best]
    best = parents[best]
  return _improve_choice(table, errors, budget, choice, resolution)


def _reference_suffixes(
  table: _table.StepTable, reference: np.ndarray
) -> list[_table.PipelineSuffix]:
  """Returns what follows each bucket if a reference codes later buckets."""
  schedule = table.schedule
  suffixes = [table.last_suffix()]
  for number in reversed(range(1, len(schedule.buckets))):
    tensors = np.array(schedule.buckets[number])
    stage = table.stage_times(
      schedule.gaps_s[number],
      table.coding_s[tensors, reference[tensors]].sum(0),
      table.payload[tensors, reference[tensors]].sum(0),
    )
    suffixes.append(_table.prepend_stage(stage, suffixes[-1]))
  return suffixes[::-1]


def _extend_labels(
  table: _table.StepTable,
  errors: np.ndarray,
  budget: float,
  labels: _Labels,
  tensor: int,
) -> tuple[_Labels, np.ndarray, np.ndarray]:
  """Returns every label with every affordable codec of one more tensor."""
  # Returns the labels, int[labels] positions of their parents, and int[labels]
  # codecs of the tensor.
  error = labels.error[:, None] + errors[tensor]
  parents, options = np.nonzero(error <= budget)
  old = _select_labels(labels, parents)
  extended = _Labels(
    error[parents, options],
    old.coding_s + table.coding_s[tensor, options],
    old.payload + table.payload[tensor, options],
    old.state,
  )
  return extended, parents, options


def _select_labels(labels: _Labels, positions: np.ndarray) -> _Labels:
  selected: _Labels = jax.tree.map(lambda a: a[positions], labels)
  return selected


def _prune_labels(
  labels: _Labels, total: np.ndarray, resolution: float, budget: float
) -> np.ndarray:
  """Returns the positions of the labels to keep."""
  # `total`: float64[labels], seconds of the step completed by the reference.
  # `resolution`: seconds below which steps are equally long.
  if len(total) <= _EXHAUSTIVE_LABELS:
    return np.arange(len(total))
  cells_per_error = _ERROR_CELLS / budget if budget else 0.0
  cell = (labels.error * cells_per_error).astype(int)
  # Each group is a cell of the error and a bit mask of collectives in use.
  bits = 1 << np.arange(labels.payload.shape[-1])
  group = cell * (2 * bits[-1]) + (labels.payload > 0) @ bits
  order = _rank_labels(total, labels.error, resolution)
  return order[np.unique(group[order], return_index=True)[1]]


def _rank_labels(
  total: np.ndarray, error: np.ndarray, resolution: float
) -> np.ndarray:
  """Returns positions, fastest first; of equally fast ones the most exact."""
  return np.lexsort((error, np.floor(total / resolution)))


def _improve_choice(
  table: _table.StepTable,
  errors: np.ndarray,
  budget: float,
  choice: np.ndarray,
  resolution: float,
) -> np.ndarray:
  """Changes one tensor at a time until no change makes the step shorter."""
  # A codec that does not shorten the step is replaced by the most exact one.
  # Pruning may lose such local improvements, because labels were ranked by the
  # reference's later codecs and not by those that were chosen.
  while True:
    old = choice.copy()
    for tensor in range(len(choice)):
      others = errors[np.arange(len(choice)), choice].sum()
      others -= errors[tensor, choice[tensor]]
      options = np.flatnonzero(others + errors[tensor] <= budget)
      # Rounding of the sums can exclude even the codec chosen, which just fits.
      if len(options) == 0:
        continue
      changed = np.tile(choice, (len(options), 1))
      changed[:, tensor] = options
      total = table.step_seconds(changed)
      order = _rank_labels(total, errors[tensor, options], resolution)
      choice[tensor] = options[order[0]]
    if (choice == old).all():
      return choice
