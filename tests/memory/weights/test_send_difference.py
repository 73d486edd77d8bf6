"""Weights that travel as differences to a reference on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmotion import codecs
from jaxmotion.memory._weights import _programs as programs
from tests.memory.helpers import (
  WIDTH,
  batch_of,
  copy_tree,
  model_of,
  params_of,
  tree_bits,
)

BLOCK = 64
TINY = np.finfo(np.float32).tiny
LEVELS = (
  codecs.uniform(bits=4, rounding="stochastic"),
  codecs.truncate(bytes=1),
  codecs.uniform(bits=8, symmetric=False),
  codecs.microscaling(format="float8_e4m3fn"),
)


def param_matrices(params):
  return [params[name]["w"] for name in ("first", "block0", "last")]


def reference_matrices(reference):
  """Returns the matrices in the order of `param_matrices`; biases have none."""
  return [
    next(packet[0] for packet in stage if packet is not None)
    for stage in copy_tree(reference)
  ]


def test_host_and_device_hold_the_same_bits_at_any_level():
  model = model_of(weights=LEVELS, send_difference=True)
  state = model.init(params_of())
  for i in range(6):
    # Each stage is at each level once, or twice.
    level = (np.arange(3) + i) % len(LEVELS)
    state, _ = model.step(state, batch_of(i), level)
    assert tree_bits(state.reference) == tree_bits(state.device_reference)
  assert all(np.any(r) for r in reference_matrices(state.reference))
  shapes = {a.shape for a in jax.tree.leaves(state.reference)}
  assert shapes == {(WIDTH, WIDTH)}


def test_the_error_is_at_most_what_the_last_payload_left_out():
  codec = codecs.uniform(bits=8, block=BLOCK)
  model = model_of(weights=codec, send_difference=True)
  state = model.init(params_of())
  errors = []
  for i in range(8):
    weights = param_matrices(copy_tree(state.params))
    before = reference_matrices(state.reference)
    state, _ = model.step(state, batch_of(i))
    after = reference_matrices(state.reference)
    errors.append(0.0)
    for w, old, new in zip(weights, before, after, strict=True):
      difference = (w.astype(np.float64) - old).reshape(-1, BLOCK)
      # Half a level of the codec, whose scale is rounded up to 16 bits; then
      # the roundings of the difference and of the sum.
      bound = np.abs(difference).max(1, keepdims=True) / 254 * (1 + 2**-15)
      bound += 2**-23 * np.abs(w).max()
      error = np.abs(w.astype(np.float64) - new)
      assert (error.reshape(-1, BLOCK) <= bound).all()
      errors[-1] = max(errors[-1], error.max())
  # The first difference is the weights themselves, the others one update.
  assert errors[0] > 1e-3 and max(errors[2:]) < errors[0] / 10


def test_the_device_computes_with_its_reference():
  weights = codecs.uniform(bits=4)
  model = model_of(weights=weights, send_difference=True, tx=optax.sgd(0.0))
  state = model.init(params_of())
  errors = [np.asarray(model.errors(state))]
  for _ in range(4):
    state, _ = model.step(state, batch_of())
    errors.append(np.asarray(model.errors(state)))
  # Constant weights: each payload of 4 bits leaves at most a 14th of the error.
  errors = np.stack(errors)
  assert (errors[1:] < errors[:-1] / 8).all()
  found = reference_matrices(state.device_reference)
  np.testing.assert_allclose(found, param_matrices(params_of()), atol=1e-4)


@pytest.mark.parametrize("codec", LEVELS[1:3])
def test_a_nonfinite_weight_leaves_its_reference_unchanged(codec):
  def send(w, reference):
    key = np.zeros(3, np.uint32)
    payloads = programs.encode(codec, "float32", [w], [reference], key)
    likes = (jax.ShapeDtypeStruct(w.shape, jnp.float32),)
    return programs.decode(codec, likes, payloads, [reference])[0]

  w = jnp.linspace(-1.0, 1.0, 2 * BLOCK)
  reference = send(w, jnp.zeros_like(w))
  expected = send(w.at[5].set(reference[5]), reference)
  assert np.isfinite(expected).all()
  for value in (np.nan, np.inf, -np.inf):
    found = send(w.at[5].set(value), reference)
    np.testing.assert_array_equal(found, expected)


def test_without_differences_a_nonfinite_weight_reaches_the_loss():
  model, params = model_of(), params_of()
  params["block0"]["w"][3, 4] = np.nan
  _, loss = model.step(model.init(params), batch_of())
  assert np.isnan(loss)


def test_a_guarded_optimizer_rejects_nonfinite_gradients():
  tx = optax.apply_if_finite(optax.adam(1e-2), max_consecutive_errors=9)
  model = model_of(tx=tx, send_difference=True)
  state, _ = model.step(model.init(params_of()), batch_of())
  before = copy_tree(state.params)
  bad = batch_of(1)
  bad["y"] = bad["y"] * np.float32(np.inf)
  state, loss = model.step(state, bad)
  assert not np.isfinite(loss)
  assert tree_bits(state.params) == tree_bits(before)
  state, loss = model.step(state, batch_of(2))
  assert np.isfinite(loss) and tree_bits(state.params) != tree_bits(before)


@pytest.mark.parametrize(
  ("reference", "difference", "expected"),
  [
    # Some backends flush subnormal numbers, and the two copies must agree.
    (
      [0.0, TINY, 1.5 * TINY, -TINY],
      [TINY, -1.5 * TINY, -TINY, 0.0],
      [TINY, 0.0, 0.0, -TINY],
    ),
    # A sum that overflows is not added.
    ([3e38, -3e38, 1.0], [1e38, -1e38, 1.0], [3e38, -3e38, 2.0]),
  ],
  ids=["subnormal", "overflow"],
)
def test_a_reference_holds_normal_numbers(reference, difference, expected):
  reference, difference = jnp.float32(reference), jnp.float32(difference)
  likes = (jax.ShapeDtypeStruct(reference.shape, jnp.float32),)
  payload, _ = codecs.identity().encode(difference)
  found = programs.decode(codecs.identity(), likes, [payload], [reference])
  # Compared as bits: a backend that flushes by itself keeps the sign of zero.
  assert tree_bits(found) == tree_bits(np.float32(expected))
