"""Differences to what the device holds."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmotion import codecs
from jaxmotion.memory.weights import _programs as programs
from tests.memory.helpers import (
  WIDTH,
  batch_of,
  bits,
  copies,
  model_of,
  params_of,
)

BLOCK = 64
TINY = np.finfo(np.float32).tiny
LADDER = (
  codecs.uniform(bits=4, rounding="stochastic"),
  codecs.truncate(bytes=1),
  codecs.uniform(bits=8, symmetric=False),
  codecs.microscaling(format="float8_e4m3fn"),
)


def matrices(state_params):
  return [tree["w"] for _, tree in sorted(state_params.items())]


def held_matrices(held):
  """In the order of `matrices`: stages are first, block0, last."""
  first, block0, last = (
    next(p[0] for p in stage if p is not None) for stage in held
  )
  return [block0, first, last]


def test_host_and_device_hold_the_same_bits_whatever_the_levels():
  model = model_of(weights=LADDER, send_difference=True)
  state = model.init(params_of())
  rng = np.random.default_rng(0)
  for i in range(25):
    level = rng.integers(0, len(LADDER), 3)
    state, _ = model.step(state, batch_of(i), level)
    assert bits(state.reference) == bits(state.device_reference)
  assert all(np.any(h) for h in held_matrices(state.reference))


def test_what_was_not_sent_is_no_more_than_the_last_codec_left_out():
  codec = codecs.uniform(bits=8, block=BLOCK)
  model = model_of(weights=codec, send_difference=True)
  state = model.init(params_of())
  errors = []
  for i in range(40):
    before, held = copies(state.params), copies(state.reference)
    state, _ = model.step(state, batch_of(i))
    pairs = zip(
      matrices(before),
      held_matrices(held),
      held_matrices(copies(state.reference)),
      strict=True,
    )
    errors.append(0.0)
    for w, old, new in pairs:
      delta = (w.astype(np.float64) - old).reshape(-1, BLOCK)
      # Half a step of the codec, whose scale is rounded up to 16 bits; then
      # the roundings of the difference and of the sum.
      bound = np.abs(delta).max(1, keepdims=True) / 254 * (1 + 2**-15)
      bound += 2**-23 * np.abs(w).max()
      error = np.abs(w.astype(np.float64) - new)
      assert (error.reshape(-1, BLOCK) <= bound).all()
      errors[-1] = max(errors[-1], error.max())
  # The first difference is the weights themselves, the others one update.
  assert errors[0] > 1e-3 and max(errors[2:]) < errors[0] / 10


def test_the_device_computes_with_what_it_holds():
  weights = codecs.uniform(bits=4)
  model = model_of(weights=weights, send_difference=True, tx=optax.sgd(0.0))
  state = model.init(params_of())
  errors = [np.asarray(model.errors(state))]
  for _ in range(4):
    state, _ = model.step(state, batch_of())
    errors.append(np.asarray(model.errors(state)))
  # Weights that stand still arrive: 4 bits leave at most a 14th of the error.
  errors = np.stack(errors)
  assert (errors[1:] < errors[:-1] / 8).all()
  held = held_matrices(state.device_reference)
  for w, h in zip(matrices(params_of()), held, strict=True):
    np.testing.assert_allclose(h, w, atol=1e-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", [LADDER[1], LADDER[2]])
def test_a_weight_that_is_not_finite_counts_as_unchanged(codec, value):
  def send(w, held):
    where = np.zeros(3, np.uint32)
    payloads = programs.encode(codec, [w], [held], where)
    likes = (jax.ShapeDtypeStruct(w.shape, jnp.float32),)
    return programs.decode(codec, likes, payloads, [held])[0]

  w = jnp.linspace(-1.0, 1.0, 2 * BLOCK)
  held = send(w, jnp.zeros_like(w))
  expected = send(w.at[5].set(held[5]), held + 0)
  found = send(w.at[5].set(value), held + 0)
  assert np.isfinite(found).all()
  np.testing.assert_array_equal(found, expected)


def test_without_delta_a_weight_that_is_not_finite_is_seen_at_once():
  model, params = model_of(), params_of()
  params["block0"]["w"][3, 4] = np.nan
  _, loss = model.step(model.init(params), batch_of())
  assert np.isnan(loss)


def test_a_guarded_optimiser_keeps_bad_gradients_out():
  tx = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=9)
  model = model_of(tx=tx, send_difference=True)
  state, _ = model.step(model.init(params_of()), batch_of())
  before = copies(state.params)
  bad = batch_of(1)
  bad["y"] = bad["y"] * np.float32(np.inf)
  state, loss = model.step(state, bad)
  assert not np.isfinite(loss)
  assert bits(state.params) == bits(before)
  state, loss = model.step(state, batch_of(2))
  assert np.isfinite(loss) and bits(state.params) != bits(before)


def add(held, delta):
  """What is held of both, after a difference that the codec left whole."""
  held, delta = jnp.float32(held), jnp.float32(delta)
  likes = (jax.ShapeDtypeStruct(held.shape, jnp.float32),)
  payload, _ = codecs.identity().encode(delta)
  return programs.decode(codecs.identity(), likes, [payload], [held])[0]


def test_subnormal_numbers_are_held_by_neither():
  """Not every backend has them, and the two copies must agree."""
  found = add([0.0, TINY, 1.5 * TINY, -TINY], [TINY, -1.5 * TINY, -TINY, 0.0])
  # Words: where subnormal results vanish by themselves, they keep a sign.
  assert bits(found) == bits(np.float32([TINY, 0.0, 0.0, -TINY]))


def test_a_difference_that_overshoots_the_greatest_number_is_not_added():
  np.testing.assert_array_equal(
    add([3e38, -3e38, 1.0], [1e38, -1e38, 1.0]), np.float32([3e38, -3e38, 2.0])
  )


def test_small_leaves_travel_whole():
  model = model_of(send_difference=True)
  state, _ = model.step(model.init(params_of()), batch_of())
  shapes = {a.shape for a in jax.tree.leaves(state.reference)}
  assert shapes == {(WIDTH, WIDTH)}
