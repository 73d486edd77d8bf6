import math

import numpy as np

from experiments.common.checkpoint import Log
from experiments.common.loop import run_cases, run_steps


class MemoryStore:
  """Keeps the last checkpoint in memory."""

  saved = None

  def save(self, state, log, layout):
    assert layout is None
    self.saved = state, Log(list(log.loss), list(log.step_ms))

  def restore(self, state, elastic):
    return self.saved or (state, Log([], []))


def add(state, batch):
  return state + batch, float(batch)


def test_a_resumed_run_ends_where_a_straight_one_does():
  options = {"steps": 5, "checkpoint_every": 2}
  straight, log = run_steps(0, add, lambda i: i, **options)
  store = MemoryStore()
  run_steps(0, add, lambda i: i, store=store, stop=3, **options)
  seen = []
  resumed, resumed_log = run_steps(
    0,
    add,
    lambda i: i,
    store=store,
    on_step=lambda *a: seen.append(a),
    **options,
  )
  assert straight == resumed == 0 + 1 + 2 + 3 + 4
  assert log.loss == resumed_log.loss == [0, 1, 2, 3, 4]
  assert seen == [(3, 2.0), (4, 3.0), (5, 4.0)]
  assert store.saved[0] == straight  # The last step has a checkpoint.


def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint():
  store, evaluated = MemoryStore(), []
  state, log = run_steps(
    0.0,
    add,
    lambda i: [1.0, 2.0, math.inf, 4.0][i],
    steps=4,
    checkpoint_every=1,
    store=store,
    evaluate=lambda done, state: evaluated.append(done),
  )
  assert log.loss == [1.0, 2.0, math.inf] and math.isinf(state)
  assert evaluated == [1, 2]
  assert store.saved[0] == 3.0


def test_an_evaluation_is_part_of_the_checkpoint():
  store = MemoryStore()

  def evaluate(done, state):
    state[done - 1] = 10 * done

  run_steps(
    np.zeros(2),
    lambda state, batch: (state, 0.5),
    lambda i: None,
    steps=2,
    checkpoint_every=2,
    store=store,
    evaluate=evaluate,
  )
  assert store.saved[0].tolist() == [10, 20]


def test_every_case_runs_with_every_seed_seeds_first():
  runs = run_cases(
    ("a", "b"),
    (0, 1),
    lambda case, seed, store, on_step: (case, seed),
    lambda run: (0.0, 0.0),
  )
  assert runs == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
