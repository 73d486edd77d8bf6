import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, controllers
from jaxmotion.controllers import error_budget
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


@pytest.mark.parametrize(
  ("budget", "growth", "level"),
  [(1e-6, 256.0, 3), (1e-4, 256.0, 2), (1e-2, 256.0, 1), (0.6, 128.0, 0)],
)
def test_it_settles_on_the_fewest_bytes_of_a_real_codec(budget, growth, level):
  x = np.random.default_rng(0).normal(0, 0.1, 4096).astype(np.float32)
  groups = controllers.group_by(x, [("", "all")])
  errors = []
  for count in range(1, 5):
    codec = codecs.truncate(bytes=count)
    y = codec.decode(codec.encode(jnp.asarray(x))[0], x)
    norms = [
      controllers.group_norms(a, groups) for a in (y - x, jnp.asarray(x))
    ]
    errors.append(norms[0] / norms[1])
  controller = error_budget(budget=budget, growth=growth, patience=5)
  state = controller.init(errors[-1])
  update = jax.jit(controller.update)
  levels = []
  for _ in range(60):
    state = update(errors[int(controller.level(state)[0])], state)
    levels.append(int(controller.level(state)[0]))
  assert levels[-1] == level
  assert float(errors[level][0]) <= budget
  # It went straight down and stayed: no level was left twice.
  assert levels == sorted(levels, reverse=True)


def test_the_oldest_switches_are_dropped_and_counted():
  controller = error_budget(
    budget=1.0, levels=2, growth=10.0, patience=1, history_size=3
  )
  levels, state = levels_of(controller, [0.0, 2.0] * 5)
  assert levels == [0, 1] * 5
  assert [tuple(s) for s in controllers.level_changes(state.history)] == [
    (8, 0, 1),
    (9, 0, 0),
    (10, 0, 1),
  ]
  # The start and ten switches, of which three are kept.
  assert state.history.dropped.tolist() == [8]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"budget": -1.0}, r"`budget` must be a number in \[0, inf\), got -1.0"),
    ({"growth": 0.5}, r"`growth` must be a number in \[1, "),
    ({"patience": 0}, r"`patience` must be an integer in \[1, "),
    ({"history_size": 0}, r"`history_size` must be an integer in \[1, "),
  ],
)
def test_bad_options_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    error_budget(**{"budget": 0.1, **options})
