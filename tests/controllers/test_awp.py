import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmotion import controllers
from jaxmotion.controllers import awp
from tests.controllers.runs import run


def follow(controller, norms):
  """Counters and levels of one group after every update."""
  state = controller.init(jnp.array(norms[:1], jnp.float32))
  update = jax.jit(controller.update)
  seen = []
  for norm in norms[1:]:
    state = update(jnp.array([norm], jnp.float32), state)
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
  seen, state = follow(awp(threshold=-0.1, interval=2), norms)
  assert seen == [row[2:] for row in BY_HAND]
  assert [tuple(s) for s in controllers.level_changes(state.history)] == [
    (0, 0, 0),
    (4, 0, 1),
    (6, 0, 2),
    (9, 0, 3),
  ]


def test_the_consecutive_counter_as_worked_by_hand():
  norms = [10.0, 8.0, 8.0, 7.0, 6.0, 5.0]
  # deltas: -1/5, 0, -1/8, -1/7, -1/6; the zero loses what was counted.
  seen, _ = follow(
    awp(threshold=-0.1, interval=2, counter="consecutive"), norms
  )
  assert seen == [(1, 0), (0, 0), (1, 0), (0, 1), (1, 1)]
  seen, _ = follow(awp(threshold=-0.1, interval=2), norms)
  assert seen == [(1, 0), (1, 0), (0, 1), (1, 1), (0, 2)]


def test_the_drift_since_the_last_reset_as_worked_by_hand():
  norms = [100.0, 96.0, 92.0, 88.0, 84.0, 80.0, 76.0, 72.0]
  # Never -10 % in one step: previous stays. Since the start: -4, -8, -12 (1),
  # -16 (2, switch); 80 is the new reference; -5 %, -10 %: not below -10 %.
  controller = awp(threshold=-0.1, interval=2, reference="last_reset")
  seen, state = follow(controller, norms)
  assert seen == [(0, 0), (0, 0), (1, 0), (0, 1), (0, 1), (0, 1), (0, 1)]
  assert float(state.reference[0]) == 80
  seen, _ = follow(awp(threshold=-0.1, interval=2), norms)
  assert seen == [(0, 0)] * 7


def test_the_window_as_worked_by_hand():
  norms = [8.0, 4.0, 12.0, 4.0, 2.0]
  # Means of two: 8, 6, 8, 8, 3; deltas -1/4, 1/3, 0, -5/8.
  seen, _ = follow(awp(threshold=-0.1, interval=9, window=2), norms)
  assert [counter for counter, _ in seen] == [1, 1, 1, 2]
  seen, _ = follow(awp(threshold=-0.1, interval=9), norms)
  assert [counter for counter, _ in seen] == [1, 1, 2, 3]


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


@pytest.fixture(scope="module")
def recorded():
  """Norms of the layers of a network while optax trains it."""
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.normal(size=(64, 8)), jnp.float32)
  y = jnp.tanh(x @ jnp.asarray(rng.normal(size=(8, 2)), jnp.float32))
  params = {
    name: {"kernel": jnp.asarray(rng.normal(size=shape), jnp.float32)}
    for name, shape in [("a", (8, 16)), ("b", (16, 16)), ("c", (16, 2))]
  }
  groups = controllers.group_by(params, [("(.*)/", r"\1")])
  tx = optax.chain(
    optax.add_decayed_weights(5e-3), optax.sgd(0.05, momentum=0.9)
  )

  def loss(params, batch):
    h = jnp.tanh(x[batch] @ params["a"]["kernel"])
    h = jnp.tanh(h @ params["b"]["kernel"])
    return jnp.mean((h @ params["c"]["kernel"] - y[batch]) ** 2)

  def step(carry, batch):
    params, state = carry
    updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
    params = optax.apply_updates(params, updates)
    return (params, state), controllers.group_norms(params, groups)

  batches = jnp.asarray(rng.integers(0, 64, (400, 16)))
  _, norms = jax.jit(lambda c: jax.lax.scan(step, c, batches))(
    (params, tx.init(params))
  )
  first = controllers.group_norms(params, groups)
  return np.concatenate([first[None], norms])


def test_it_switches_where_the_papers_pseudo_code_does(recorded):
  threshold, interval = -2e-4, 60
  deltas = np.diff(recorded.astype(np.float64), axis=0) / recorded[:-1]
  # No delta is so near that float32 could tell otherwise.
  assert np.abs(deltas - threshold).min() > 1e-6
  controller = awp(threshold=threshold, interval=interval)
  _, levels = run(controller, recorded[0], recorded[1:])
  bits = [in_plain_python(n, threshold, interval) for n in recorded.T.tolist()]
  np.testing.assert_array_equal(8 + 8 * np.asarray(levels), np.transpose(bits))
  # The layers switch, and not all at the same batches.
  assert len({tuple(b) for b in bits}) == 3
  assert max(map(max, bits)) >= 24


def test_alternating_norms_trigger_the_cumulative_counter_alone():
  norms = [10.0, *[8.0, 10.0] * 20]
  seen, _ = follow(awp(threshold=-0.1, interval=5), norms)
  assert seen[-1][1] == 3
  seen, _ = follow(
    awp(threshold=-0.1, interval=5, counter="consecutive"), norms
  )
  assert seen[-1] == (0, 0)


def test_a_slow_fall_triggers_alexnets_threshold_only_as_a_drift():
  norms = 100 * 0.999 ** np.arange(200)
  preset = dataclasses.replace(controllers.awp_preset("alexnet"), interval=20)
  seen, _ = follow(preset, norms)
  assert seen[-1] == (0, 0)
  # 0.999^51 = 0.9502 and 0.999^52 = 0.9493: counted from the 52nd on, full
  # with the 71st; the 72nd is the new reference, so again after 72 + 52 + 19.
  drift = dataclasses.replace(preset, reference="last_reset")
  _, state = follow(drift, norms)
  told = [s.step for s in controllers.level_changes(state.history)]
  assert told == [0, 71, 143]


def test_a_drift_survives_norms_that_jump_at_a_switch():
  controller = awp(threshold=-0.05, interval=2, reference="last_reset")
  state = controller.init(jnp.array([62.0]))
  update = jax.jit(controller.update)
  shrink = [0.62, 0.997, 1.0, 1.0]  # of norms that truncation leaves
  for i in range(1, 40):
    seen = shrink[int(controller.level(state)[0])]
    state = update(jnp.array([100 * 0.99**i * seen]), state)
  assert int(controller.level(state)[0]) == 3


@pytest.mark.parametrize("reference", ["previous", "last_reset"])
def test_weights_that_start_at_zero_wait_for_a_first_norm(reference):
  controller = awp(threshold=-0.1, interval=1, reference=reference)
  seen, _ = follow(controller, [0.0, 0.0, 4.0, 3.0])
  assert seen == [(0, 0), (0, 0), (0, 1)]


def test_a_bad_first_norm_is_replaced():
  controller = awp(threshold=-0.1, interval=1, reference="last_reset")
  seen, _ = follow(controller, [np.nan, 4.0, 3.0])
  assert seen == [(0, 0), (0, 1)]


def test_the_presets_have_the_papers_constants():
  presets = [
    controllers.awp_preset(name) for name in ("alexnet", "vgg", "resnet")
  ]
  assert [(p.threshold, p.interval) for p in presets] == [
    (-5e-2, 4000),
    (-2e-3, 4000),
    (-2e-5, 2000),
  ]
  for p in presets:
    assert p == awp(threshold=p.threshold, interval=p.interval, levels=4)
  with pytest.raises(ValueError, match="`network` must be one of 'alexnet', "):
    controllers.awp_preset("lenet")


@pytest.mark.parametrize(
  ("options", "error", "message"),
  [
    ({"threshold": "-1"}, TypeError, r"`threshold` must be a number in \[-1,"),
    ({"threshold": -2.0}, ValueError, r"`threshold` .* got -2.0"),
    ({"interval": 0}, ValueError, r"`interval` must be an integer in \[1, "),
    ({"levels": 0}, ValueError, r"`levels` must be an integer in \[1, "),
    ({"window": 1.5}, TypeError, r"`window` must be an integer"),
    ({"counter": "c"}, ValueError, r"`counter` must be one of 'cumulative'"),
    ({"reference": "r"}, ValueError, r"`reference` must be one of 'previous'"),
  ],
)
def test_bad_options_are_named(options, error, message):
  with pytest.raises(error, match=message):
    awp(**{"threshold": -0.1, "interval": 2, **options})
