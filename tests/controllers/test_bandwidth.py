import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion.controllers import Times, bandwidth

BYTES = (100, 200, 300, 400)


def drive(controller, paces, compute):
  """Levels of groups over links of so many seconds a byte at each step."""
  compute = jnp.asarray(compute, jnp.float32)
  moved = jnp.asarray(controller.level_bytes, jnp.float32)

  def step(state, pace):
    times = Times(pace * moved[controller.level(state)], compute)
    state = controller.update(times, state)
    return state, controller.level(state)

  start = controller.init(Times(compute, compute))
  run = jax.jit(lambda state: jax.lax.scan(step, state, jnp.asarray(paces)))
  return np.asarray(run(start)[1])


def test_it_settles_on_the_most_bytes_that_hide_on_any_link():
  controller = bandwidth(level_bytes=BYTES, patience=3)
  levels = drive(controller, np.full(30, 0.01), [0.5, 1.5, 2.5, 3.5, 99.0])
  assert not levels[:2].any()
  assert (levels[2:] == [0, 0, 1, 2, 3]).all()
  controller = bandwidth(level_bytes=BYTES, patience=5, decay=0.5)
  (levels,) = drive(controller, np.repeat([0.01, 0.03, 0.01], 40), [4.5]).T
  assert levels[39] == 3 and levels[79] == 0 and levels[119] == 3
  assert levels[41] < 3  # the second slow measurement is enough


def test_noise_does_not_move_it_to_and_fro():
  noise = np.random.default_rng(0).normal(0.01, 0.0005, 300)
  # Level 2 fills the computation to 97 %: within the noise.
  calm = drive(bandwidth(level_bytes=BYTES), noise, [3.1])
  assert set(calm[20:, 0]) == {1}
  eager = bandwidth(level_bytes=BYTES, margin=1.0, patience=1, decay=0.0)
  assert np.abs(np.diff(drive(eager, noise, [3.1])[:, 0])).sum() > 20


def test_negative_times_are_skipped():
  controller = bandwidth(level_bytes=BYTES)
  one = jnp.ones(1)
  state = controller.init(Times(one, one))
  new = controller.update(Times(-one, one), state)
  assert new.history.skipped.tolist() == [1]
  assert new.measured.tolist() == [0]
