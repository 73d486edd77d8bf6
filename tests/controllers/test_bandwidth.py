import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.controllers import Times, bandwidth

BYTES = (100, 200, 300, 400)


def drive(controller, pace_of, compute_of, steps):
  """Levels over a link whose seconds a byte are `pace_of(step)`."""
  one = jnp.ones(1)
  state = controller.init(Times(one, one))
  update = jax.jit(controller.update)
  levels = []
  for step in range(steps):
    moved = controller.level_bytes[int(controller.level(state)[0])]
    times = Times(one * pace_of(step) * moved, one * compute_of(step))
    state = update(times, state)
    levels.append(int(controller.level(state)[0]))
  return levels


@pytest.mark.parametrize(
  ("compute", "level"), [(0.5, 0), (1.5, 0), (2.5, 1), (3.5, 2), (99.0, 3)]
)
def test_it_settles_on_the_most_bytes_that_hide(compute, level):
  controller = bandwidth(level_bytes=BYTES, patience=3)
  levels = drive(controller, lambda _: 0.01, lambda _: compute, 30)
  assert levels == [0] * 2 + [level] * 28


def test_a_slower_link_lowers_the_level_and_a_faster_one_raises_it():
  controller = bandwidth(level_bytes=BYTES, patience=5, decay=0.5)
  pace = lambda step: 0.01 if not 40 <= step < 80 else 0.03
  levels = drive(controller, pace, lambda _: 4.5, 120)
  assert levels[39] == 3 and levels[79] == 0 and levels[119] == 3
  assert levels[41] < 3  # the second slow measurement is enough


def test_noise_does_not_move_it_to_and_fro():
  noise = np.random.default_rng(0).normal(1, 0.05, 300)
  # Level 2 fills the computation to 97 %: within the noise.
  pace, compute = lambda step: 0.01 * noise[step], lambda _: 3.1
  calm = drive(bandwidth(level_bytes=BYTES), pace, compute, 300)
  assert set(calm[20:]) == {1}
  eager = bandwidth(level_bytes=BYTES, margin=1.0, patience=1, decay=0.0)
  assert np.abs(np.diff(drive(eager, pace, compute, 300))).sum() > 20


def test_negative_times_are_skipped():
  controller = bandwidth(level_bytes=BYTES)
  one = jnp.ones(1)
  state = controller.init(Times(one, one))
  new = controller.update(Times(-one, one), state)
  assert new.history.skipped.tolist() == [1]
  assert new.measured.tolist() == [0]


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"level_bytes": ()}, ValueError, r"`level_bytes` must rise .* got \(\)"),
    ({"level_bytes": (2, 2)}, ValueError, r"`level_bytes` must rise"),
    ({"level_bytes": (1.5,)}, TypeError, r"`level_bytes.*` must be an integer"),
    ({"decay": 1.0}, ValueError, r"`decay` must be a number in \[0, 1\)"),
    ({"margin": 1.1}, ValueError, r"`margin` must be a number in \(0, 1\]"),
  ],
)
def test_bad_options_are_named(options, error, message):
  with pytest.raises(error, match=message):
    bandwidth(**{"level_bytes": BYTES, **options})
