"""The search finds what trying all choices finds."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxmotion.planner.exchange import _search
from jaxmotion.planner.exchange._problem import BucketSchedule
from jaxmotion.planner.exchange._search import search_choice
from jaxmotion.planner.exchange._table import StepTable, TensorCosts, make_table
from tests.planner.problems import THREE, cluster, every_choice, problem_on

TIMES = np.geomspace(1, 1e9, 200)


def random_table(rng, tensors, codecs, buckets, overlap):
  """Tensors of 1e3 to 1e7 elements, one sum and two other collectives."""
  size = 10 ** rng.uniform(3, 7, tensors)
  coding_s = np.zeros((tensors, codecs, 3))
  rate = 10 ** rng.uniform(-11, -9, (1, codecs - 1, 3))
  coding_s[:, 1:] = 1e-5 + size[:, None, None] * rate
  payload = np.zeros((tensors, codecs, 3))
  payload[:, 0, 0] = 4 * size
  payload[:, 1:, 1] = 4 * size[:, None] * rng.uniform(0.02, 0.6, codecs - 1)
  payload[:, 1:, 2] = payload[:, 1:, 1] / 8
  rates = 10 ** rng.uniform(8, 9.5, 3)
  curves = tuple((TIMES, 1e-3 * rng.uniform() + TIMES / r) for r in rates)
  cuts = np.sort(rng.choice(np.arange(1, tensors), buckets - 1, replace=False))
  parts = np.split(rng.permutation(tensors), cuts)
  schedule = BucketSchedule(
    tuple(tuple(part.tolist()) for part in parts),
    tuple(rng.uniform(0, 0.02, buckets + 1)),
    1e-3,
  )
  errors = np.zeros((tensors, codecs))
  errors[:, 1:] = rng.uniform(0, 1, (tensors, codecs - 1)) ** 3
  table = StepTable(
    schedule,
    overlap,
    "gather",
    np.arange(codecs),
    coding_s,
    payload,
    np.ones((3, 1)),
    curves,
  )
  return table, errors


def shortest(table, errors, budget):
  """Seconds of the shortest step, by trying all choices."""
  every = every_choice(*errors.shape)
  lost = errors[np.arange(len(errors)), every].sum(1)
  return table.step_seconds(every[lost <= budget]).min()


def cases(count, tensors, seed=0):
  rng = np.random.default_rng(seed)
  for _ in range(count):
    buckets = int(rng.integers(1, 4))
    overlap = bool(rng.integers(2))
    table, errors = random_table(rng, tensors, 3, buckets, overlap)
    yield table, errors, float(errors.max(1).sum() * rng.uniform(0, 0.7))


def test_the_shortest_step_of_three_tensors_and_codecs_is_found():
  # The reference changes how fast a step is found, not which.
  references = itertools.cycle(([0, 0, 0], [0, 1, 0]))
  for table, errors, budget in cases(100, 3):
    reference = np.array(next(references))
    found = search_choice(table, errors, budget, reference)
    assert errors[np.arange(3), found].sum() <= budget
    best = pytest.approx(shortest(table, errors, budget), rel=1e-8)
    assert table.total_seconds(found) == best


def test_pruned_labels_lose_little(monkeypatch):
  # Of 3^8 labels, at most 3 are kept for each of 64 cells.
  monkeypatch.setattr(_search, "_EXHAUSTIVE_LABELS", 64)
  monkeypatch.setattr(_search, "_ERROR_CELLS", 64)
  regrets = []
  for table, errors, budget in cases(30, 8):
    found = search_choice(table, errors, budget, np.zeros(8, int))
    assert errors[np.arange(8), found].sum() <= budget
    best = shortest(table, errors, budget)
    regrets.append(table.total_seconds(found) / best - 1)
  assert max(regrets) < 0.02
  assert np.mean(regrets) < 0.001


@pytest.mark.parametrize(
  ("gbit", "bucket_bytes"), [(0.1, 1), (10, None), (1000, 1)]
)
def test_the_costs_of_a_real_step_are_searched_as_well(gbit, bucket_bytes):
  problem = problem_on(cluster(8, gbit), bucket_bytes=bucket_bytes)
  costs = TensorCosts(problem)
  table = make_table(costs, THREE, "two_phase", mixed=True)
  errors = np.array([[0, 1e-5, 1e-3]] * 3) * [[1], [300], [200]]
  for budget in (0.0, 0.01, 0.3, 1.0):
    found = search_choice(table, errors, budget, np.zeros(3, int))
    assert errors[np.arange(3), found].sum() <= budget
    assert table.total_seconds(found) == pytest.approx(
      shortest(table, errors, budget), rel=1e-8
    )


def test_the_most_exact_of_equal_steps_is_chosen():
  rng = np.random.default_rng(0)
  table, errors = random_table(rng, 4, 3, 1, True)
  # Neither the link nor the codecs take time.
  still = dataclasses.replace(
    table,
    coding_s=0 * table.coding_s,
    curves=tuple((sizes, 0 * times) for sizes, times in table.curves),
  )
  reference = np.full(4, 2)
  assert not search_choice(still, errors, np.inf, reference).any()
