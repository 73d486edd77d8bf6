"""Encoded optimizer state in `nnx.Optimizer`, against optax by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmotion.nnx
from jaxmotion import memory

TX = memory.adamw_8bit(1e-2, min_leaf_size=0)
X = jnp.linspace(-1.0, 1.0, 4 * 32).reshape(4, 32)


def make_model():
  return nnx.Linear(32, 16, rngs=nnx.Rngs(0))


def loss_fn(model):
  return jnp.mean((model(X) - 1) ** 2)


@nnx.jit
def make_both():
  model = make_model()
  tx = jaxmotion.nnx.flatten_state(TX)
  return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


@nnx.jit
def step(model, optimizer):
  loss, grads = nnx.value_and_grad(loss_fn)(model)
  optimizer.update(model, grads)
  return loss


def test_an_optimizer_of_flax_trains_as_optax_does():
  model, optimizer = make_both()
  graph, params = nnx.split(make_model())
  params = nnx.as_pure(params)

  @jax.jit
  def plain_step(params, state):
    loss, grads = jax.value_and_grad(
      lambda params: loss_fn(nnx.merge(graph, params))
    )(params)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  state = jax.jit(TX.init)(params)
  for _ in range(3):
    params, state, loss = plain_step(params, state)
    # The same operations, which XLA may fuse otherwise.
    np.testing.assert_allclose(step(model, optimizer), loss, rtol=1e-6)
  found = jax.tree.leaves(nnx.state(model, nnx.Param))
  for a, b in zip(found, jax.tree.leaves(params), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  kept = jax.tree.leaves(optimizer.opt_state)
  shapes = [(a.shape, a.dtype) for a in jax.tree.leaves(state)]
  assert [(a.shape, a.dtype) for a in kept] == shapes


def test_a_saved_optimizer_continues_and_that_of_another_is_refused():
  model, optimizer = make_both()
  step(model, optimizer)
  saved = jax.tree.map(np.array, nnx.state((model, optimizer)))
  expected = [float(step(model, optimizer)) for _ in range(2)]
  nnx.update((model, optimizer), saved)
  assert [float(step(model, optimizer)) for _ in range(2)] == expected
  tx = jaxmotion.nnx.flatten_state(optax.sgd(0.1, momentum=0.9))
  with pytest.raises(ValueError, match="`state` must be like"):
    tx.update({"w": X}, (), {"w": X})
  with pytest.raises(TypeError, match="`tx` must be an optax"):
    jaxmotion.nnx.flatten_state("adam")
