"""Weights in bfloat16 on the device, float32 masters on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmotion import codecs, memory, wire
from tests.memory.helpers import (
  ADAM,
  PLAIN,
  WIDTH,
  batch_of,
  copy_tree,
  model_of,
  params_of,
  record_ops,
  tree_bits,
  whole_loss,
)

HALF = {"device_dtype": "bfloat16", "min_leaf_size": WIDTH + 1}


def to_half(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)


def dtypes(tree):
  return {a.dtype.name for a in jax.tree.leaves(tree)}


def half_batch(seed):
  return jax.tree.map(lambda x: np.asarray(to_half(x)), batch_of(seed))


def half_loss(params, batch):
  return whole_loss(params, batch).astype(jnp.float32)


def train_masters(params, steps, tx):
  """Trains float32 parameters by gradients of their bfloat16 copies."""
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
  state = tx.init(params)
  grad = jax.jit(jax.grad(half_loss))

  @jax.jit
  def update(params, state, grads):
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  for i in range(steps):
    params, state = update(params, state, grad(to_half(params), half_batch(i)))
  return params, state


@pytest.mark.parametrize(
  "given", [params_of(), to_half(params_of())], ids=dtypes
)
def test_masters_are_those_of_mixed_precision_bit_for_bit(given):
  model = memory.HostResident(half_loss, ADAM, **PLAIN, **HALF)
  state = model.init(given)
  for i in range(4):
    state, _ = model.step(state, half_batch(i))
  params, opt_state = train_masters(given, 4, ADAM)
  assert tree_bits(state.params) == tree_bits(params)
  assert tree_bits(state.opt_state) == tree_bits((opt_state,))
  assert dtypes(state.params) == {"float32"}


def test_half_of_the_bytes_travel_each_way():
  params = params_of()
  model = model_of(**PLAIN, **HALF)
  seen, run_op = record_ops()
  state, _ = model.step(model.init(params), half_batch(0), run_op=run_op)
  size = sum(a.size for a in jax.tree.leaves(params))
  assert state.sent_bytes == state.returned_bytes == 2 * size
  assert model.plain_bytes(params) == 4 * size
  inputs = [args[1] for name, args, _ in seen if name == "forward"]
  assert dtypes(inputs) == {"bfloat16"}
  coded = model_of(**HALF)
  state, _ = coded.step(coded.init(params), half_batch(0))
  matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
  biases = 2 * 2 * WIDTH
  int8 = wire.payload_bytes(codecs.uniform(bits=8), matrix)
  assert state.sent_bytes == state.returned_bytes == biases + 3 * int8


def test_masters_keep_updates_that_bfloat16_would_round_away():
  def loss(params, batch):
    return jnp.mean((params["w"].astype(jnp.float32) - batch["x"]) ** 2)

  batch = {"x": np.full((8, 8), 1.5, np.float32)}
  params = {"w": np.ones((8, 8), np.float32)}
  tx = optax.sgd(1e-2)
  options = {"min_leaf_size": 0, **PLAIN}
  model = memory.HostResident(loss, tx, device_dtype=jnp.bfloat16, **options)
  whole = memory.HostResident(loss, tx, **options)
  state, expected = model.init(params), whole.init(params)
  for _ in range(50):
    state, _ = model.step(state, batch)
    expected, _ = whole.step(expected, batch)
  # A step is 2^-12, half of a bfloat16's last place at 1 is 2^-8.
  assert 0.005 < state.params["w"].min() - 1 < 2**-7
  np.testing.assert_allclose(state.params["w"], expected.params["w"], rtol=1e-3)


def test_differences_stay_float32_and_the_device_computes_in_half():
  grads = codecs.feedback(codecs.uniform(bits=8))
  model = model_of(send_difference=True, grads=grads, **HALF)
  seen, run_op = record_ops()
  state, _ = model.step(model.init(params_of()), half_batch(0), run_op=run_op)
  assert tree_bits(state.reference) == tree_bits(state.device_reference)
  inputs = [args[1] for name, args, _ in seen if name == "forward"]
  assert dtypes(inputs) == {"bfloat16"}
  # The error counts the rounding to bfloat16.
  for i in range(6):
    state, _ = model.step(state, half_batch(i))
  assert np.all(np.asarray(model.errors(state)) > 2**-10)
  assert np.all(np.asarray(model.errors(state)) < 2**-7)


def test_the_device_holds_half_of_the_weights():
  count = lambda fn, *args: 0
  params, batch = params_of(6), half_batch(0)
  for difference in (False, True):
    half, whole = (
      model_of(6, send_difference=difference, **options).device_bytes(
        params, batch, measure_memory=count
      )
      for options in (HALF, {})
    )
    weights = 4 * sum(a.size for a in jax.tree.leaves(params))
    assert (half < whole) if not difference else half < whole + weights


def test_a_state_of_half_weights_continues_bit_for_bit():
  model = model_of(send_difference=True, **HALF)
  state, _ = model.step(model.init(params_of()), half_batch(0))
  saved = copy_tree(state)
  expected, _ = model.step(state, half_batch(1))
  found, _ = model.step(model.place_state(saved), half_batch(1))
  assert tree_bits(found) == tree_bits(expected)


def test_wrong_dtypes_are_refused():
  for wrong in ("int8", "bf16", None, 7):
    with pytest.raises(ValueError, match="`device_dtype` must be one of"):
      model_of(device_dtype=wrong)
  with pytest.raises(TypeError, match='set `device_dtype="bfloat16"`'):
    model_of().init(to_half(params_of()))
