"""Weights in bfloat16 on the device, float32 masters on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, memory
from tests.memory.helpers import (
  ADAM,
  PLAIN,
  WIDTH,
  batch_of,
  make_update,
  model_of,
  params_of,
  record_step,
  tree_bits,
  whole_loss,
)

HALF = {"device_dtype": "bfloat16", "min_leaf_size": WIDTH + 1}


def to_half(tree):
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)


def dtypes(tree):
  return {a.dtype.name for a in jax.tree.leaves(tree)}


def half_batch(seed=0):
  return jax.tree.map(lambda x: np.asarray(to_half(x)), batch_of(seed))


def half_loss(params, batch):
  return whole_loss(params, batch).astype(jnp.float32)


def train_masters(params, steps, tx):
  """Trains float32 parameters by gradients of their bfloat16 copies."""
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
  state = tx.init(params)
  grad, update = jax.jit(jax.grad(half_loss)), make_update(tx)
  for i in range(steps):
    params, state = update(params, state, grad(to_half(params), half_batch(i)))
  return params, state


@pytest.mark.parametrize("given", [params_of(), to_half(params_of())])
def test_masters_are_those_of_mixed_precision_bit_for_bit(given):
  model = memory.HostResident(half_loss, ADAM, **PLAIN, **HALF)
  state = model.init(given)
  for i in range(3):
    state, _ = model.step(state, half_batch(i))
  params, opt_state = train_masters(given, 3, ADAM)
  assert tree_bits(state.params) == tree_bits(params)
  assert tree_bits(state.opt_state) == tree_bits((opt_state,))
  assert dtypes(state.params) == {"float32"}


def test_half_of_the_bytes_travel_each_way():
  params = params_of()
  model = model_of(**PLAIN, **HALF)
  state, seen = record_step(model, model.init(params), half_batch())
  assert state.sent_bytes == state.returned_bytes
  assert model.plain_bytes(params) == 2 * state.sent_bytes
  inputs = [args[1] for name, args, _ in seen if name == "forward"]
  assert dtypes(inputs) == {"bfloat16"}


def test_differences_stay_float32_and_the_device_computes_in_half():
  grads = codecs.feedback(codecs.uniform(bits=8))
  model = model_of(send_difference=True, grads=grads, **HALF)
  state, seen = record_step(model, model.init(params_of()), half_batch())
  assert tree_bits(state.reference) == tree_bits(state.device_reference)
  inputs = [args[1] for name, args, _ in seen if name == "forward"]
  assert dtypes(inputs) == {"bfloat16"}
  # The error counts the rounding to bfloat16.
  for i in range(6):
    state, _ = model.step(state, half_batch(i))
  errors = np.asarray(model.errors(state))
  assert np.all((errors > 2**-10) & (errors < 2**-7))


def test_the_device_holds_half_of_the_weights():
  params = params_of(6)
  weights = 4 * sum(a.size for a in jax.tree.leaves(params))
  for difference, more in ((False, 0), (True, weights)):
    half, whole = (
      model_of(6, send_difference=difference, **options).device_bytes(
        params, half_batch(), measure_memory=lambda fn, *args: 0
      )
      for options in (HALF, {})
    )
    assert half < whole + more


def test_half_weights_without_masters_are_refused():
  with pytest.raises(TypeError, match='set `device_dtype="bfloat16"`'):
    model_of().init(to_half(params_of()))
