import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs, controllers
from jaxmotion.controllers import error_budget
from tests.codecs.jitted import trip
from tests.controllers.runs import run


def levels_of(controller, errors):
  errors = jnp.asarray(errors, jnp.float32)[:, None]
  state, levels = run(controller, errors[0], errors)
  return np.asarray(levels)[:, 0].tolist(), state


def test_up_at_once_and_down_after_patience_as_worked_by_hand():
  # growth 10: the level below is predicted to stay within 1 up to 0.1 here.
  controller = error_budget(budget=1.0, levels=3, growth=10.0, patience=2)
  errors = [0.1, 0.05, 0.2, 0.05, 0.2, 0.05, 0.05, 1.0, 1.1, 2.0, 0.0]
  levels, state = levels_of(controller, errors)
  assert levels == [2, 1, 1, 1, 1, 1, 0, 0, 1, 2, 2]
  assert state.streak.tolist() == [1]


def test_it_settles_on_the_fewest_bytes_of_a_real_codec():
  x = np.random.default_rng(0).normal(0, 0.1, 4096).astype(np.float32)
  errors = []
  for count in range(1, 5):
    codec = codecs.truncate(bytes=count)
    _, y = trip(codec, x)
    errors.append(np.linalg.norm(y - x) / np.linalg.norm(x))
  for budget, growth, level in (
    (1e-6, 256.0, 3),
    (1e-4, 256.0, 2),
    (1e-2, 256.0, 1),
    (0.6, 128.0, 0),
  ):
    controller = error_budget(budget=budget, growth=growth, patience=5)
    state, seen = controller.init(jnp.zeros(1)), []
    for _ in range(30):
      error = jnp.asarray(errors)[controller.level(state)]
      state = controller.update(error, state)
      seen.append(int(controller.level(state)[0]))
    assert seen[-1] == level and errors[level] <= budget
    # It went straight down and stayed: no level was left twice.
    assert seen == sorted(seen, reverse=True)


def test_the_oldest_switches_are_dropped_and_counted():
  options = dict(levels=2, growth=10.0, patience=1, history_size=3)
  controller = error_budget(budget=1.0, **options)
  levels, state = levels_of(controller, [0.0, 2.0] * 5)
  assert levels == [0, 1] * 5
  assert [tuple(s) for s in controllers.level_changes(state.history)] == [
    (8, 0, 1),
    (9, 0, 0),
    (10, 0, 1),
  ]
  # The start and ten switches, of which three are kept.
  assert state.history.dropped.tolist() == [8]
