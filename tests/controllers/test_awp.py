import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import controllers
from jaxmotion.controllers import awp
from tests.controllers.runs import run


def follow(norms, interval=2, **options):
  """Counters and levels of one group after every update, and the state."""
  controller = awp(threshold=-0.1, interval=interval, **options)
  state = controller.init(jnp.array(norms[:1], jnp.float32))
  seen = []
  for norm in norms[1:]:
    state = controller.update(jnp.array([norm], jnp.float32), state)
    seen.append((int(state.counter[0]), int(controller.level(state)[0])))
  return seen, state


# Worked by hand for T = -0.1 and INTERVAL = 2.
BY_HAND = [
  # norm, delta, counter, level
  (8.0, -2 / 10, 1, 0),
  (8.0, 0, 1, 0),
  (9.0, 1 / 8, 1, 0),  # it goes up, and what was counted stays counted
  (7.0, -2 / 9, 0, 1),
  (6.0, -1 / 7, 1, 1),
  (5.0, -1 / 6, 0, 2),
  (4.9, -1 / 50, 0, 2),  # not enough
  (4.0, -9 / 49, 1, 2),
  (3.0, -1 / 4, 0, 3),
  (2.0, -1 / 3, 1, 3),
  (1.0, -1 / 2, 0, 3),  # there is no higher level
  (0.5, -1 / 2, 1, 3),
]


def test_the_papers_rule_as_worked_by_hand():
  norms = [10.0, *(row[0] for row in BY_HAND)]
  deltas = [(b - a) / a for a, b in itertools.pairwise(norms)]
  np.testing.assert_allclose(deltas, [row[1] for row in BY_HAND])
  seen, state = follow(norms)
  assert seen == [row[2:] for row in BY_HAND]
  changes = list(map(tuple, controllers.level_changes(state.history)))
  assert changes == [(0, 0, 0), (4, 0, 1), (6, 0, 2), (9, 0, 3)]


def test_the_consecutive_counter_and_the_window_as_worked_by_hand():
  norms = [10.0, 8.0, 8.0, 7.0, 6.0, 5.0]
  # deltas: -1/5, 0, -1/8, -1/7, -1/6; the zero loses what was counted.
  seen, _ = follow(norms, counter="consecutive")
  assert seen == [(1, 0), (0, 0), (1, 0), (0, 1), (1, 1)]
  assert follow(norms)[0] == [(1, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
  norms = [8.0, 4.0, 12.0, 4.0, 2.0]
  # Means of two: 8, 6, 8, 8, 3; deltas -1/4, 1/3, 0, -5/8.
  seen, _ = follow(norms, interval=9, window=2)
  assert [counter for counter, _ in seen] == [1, 1, 1, 2]
  seen, _ = follow(norms, interval=9)
  assert [counter for counter, _ in seen] == [1, 1, 2, 3]


def test_the_drift_since_the_last_reset_as_worked_by_hand():
  norms = [100.0, 96.0, 92.0, 88.0, 84.0, 80.0, 76.0, 72.0]
  # Never -10 % in one step: previous stays. Since the start: -4, -8, -12 (1),
  # -16 (2, switch); 80 is the new reference; -5 %, -10 %: not below -10 %.
  seen, state = follow(norms, reference="last_reset")
  assert seen == [(0, 0), (0, 0), (1, 0), (0, 1), (0, 1), (0, 1), (0, 1)]
  assert float(state.reference[0]) == 80
  assert follow(norms)[0] == [(0, 0)] * 7


def in_plain_python(norms, threshold, interval):
  """The paper's pseudo-code for one layer: bits after every batch."""
  bits, count, told = 8, 0, []
  for before, now in itertools.pairwise(norms):
    if (now - before) / before < threshold:
      count += 1
    if count == interval:
      bits, count = min(bits + 8, 32), 0
    told.append(bits)
  return told


def draw_norms():
  """Norms of three groups that fall by steps of very different length."""
  rng = np.random.default_rng(0)
  steps = rng.normal([-1e-4, -3e-4, 1e-4], 5e-4, (400, 3))
  return np.float32(10 * np.cumprod(1 + steps, 0))


def test_it_switches_where_the_papers_pseudo_code_does():
  threshold, interval, norms = -2e-4, 60, draw_norms()
  deltas = np.diff(norms.astype(np.float64), axis=0) / norms[:-1]
  # No delta is so near that float32 could tell otherwise.
  assert np.abs(deltas - threshold).min() > 1e-7
  controller = awp(threshold=threshold, interval=interval)
  _, levels = run(controller, norms[0], norms[1:])
  bits = [in_plain_python(n, threshold, interval) for n in norms.T.tolist()]
  np.testing.assert_array_equal(8 + 8 * np.asarray(levels), np.transpose(bits))
  # The groups switch, and not all at the same updates.
  assert len({tuple(b) for b in bits}) == 3
  assert max(map(max, bits)) >= 24


@pytest.mark.parametrize("reference", ["previous", "last_reset"])
@pytest.mark.parametrize("first", [(0.0, 0.0), (np.nan,)])
def test_norms_that_are_no_reference_are_replaced(reference, first):
  seen, _ = follow([*first, 4.0, 3.0], interval=1, reference=reference)
  assert seen == [(0, 0)] * len(first) + [(0, 1)]
