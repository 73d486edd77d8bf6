import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmotion
import jaxmotion.nnx
from jaxmotion import codecs, wire

MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))


class Network(nnx.Module):
  """A network with statistics of its batch and random bits of its own."""

  def __init__(self, rngs):
    self.first = nnx.Linear(8, 64, use_bias=False, rngs=rngs)
    self.norm = nnx.BatchNorm(64, rngs=rngs)
    self.dropout = nnx.Dropout(0.2, rngs=rngs)
    self.last = nnx.Linear(64, 4, rngs=rngs)

  def __call__(self, x):
    return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss_fn(scale, model, x):
  return scale * jnp.mean(model(x) ** 2), model.norm.mean[...]


def train(value_and_grad, tx, wrt):
  """Trains a module that is the second argument, and keeps the rest of it."""
  with jax.set_mesh(MESH):
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, tx, wrt=wrt)

    @nnx.jit
    def step(model, optimizer, x):
      grad_fn = value_and_grad(
        loss_fn, argnums=nnx.DiffState(1, wrt), has_aux=True
      )
      (loss, mean), grads = grad_fn(jnp.float32(2.0), model, x)
      optimizer.update(model, grads)
      return loss, mean

    x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    x = jax.device_put(x, NamedSharding(MESH, P("data")))
    for _ in range(3):
      results = step(model, optimizer, x)
    compiled = step.lower(model, optimizer, x).compile()
    sent = wire.step_bytes(step, model, optimizer, x).total_bytes
  assert sent <= wire.compiled_bytes(compiled).total_bytes
  return (nnx.state(model), results), compiled


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.PathContains("last")])
def test_modules_statistics_and_random_keys_are_as_with_nnx(wrt):
  plain, _ = train(nnx.value_and_grad, optax.sgd(0.1), wrt)
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  own, _ = train(jaxmotion.nnx.value_and_grad, tx, wrt)
  for a, b in zip(*map(jax.tree.leaves, (own, plain)), strict=True):
    if not jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
      np.testing.assert_allclose(a, b, atol=1e-6 * float(np.abs(b).max()))


def test_variables_that_are_not_differentiated_are_not_sent():
  codec = codecs.uniform(bits=8)
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1))
  wrt = nnx.PathContains("last")
  _, compiled = train(jaxmotion.nnx.value_and_grad, tx, wrt)
  # Less than the 2,048 bytes of the first layer, which stays as it is.
  assert wire.compiled_bytes(compiled.compiled).total_bytes < 2048


def test_an_argument_that_is_not_there_is_named():
  grad_fn = jaxmotion.nnx.value_and_grad(loss_fn, argnums=1)
  with pytest.raises(ValueError, match="`argnums` must be .* got 1 for 1"):
    grad_fn(jnp.float32(1.0))
