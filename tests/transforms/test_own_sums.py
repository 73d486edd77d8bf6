"""Gradients that a trainer sums by itself, in maps that give no types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmotion

MESH = jax.sharding.Mesh(jax.devices()[:4], ("data",))
W = np.full((3, 2), 0.5, np.float32)
BATCH = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


def loss_fn(w, batch):
  return jnp.mean((batch @ w - 1) ** 2)


def mean_loss(w, batch):
  return lax.pmean(loss_fn(w, batch), "data")


def summed_loss(w, batch):
  return lax.psum(loss_fn(w, batch), "data")


def exchange_all(w, batch):
  """What an exchange makes of a trainer's gradients, by how it sums them."""
  own = jax.grad(loss_fn)(w, batch)
  gradients = {
    "own": own,
    "mean of gradients": lax.pmean(own, "data"),
    "sum of gradients": lax.psum(own, "data"),
    "gradient of the mean": jax.grad(mean_loss)(w, batch),
    "gradient of the sum": jax.grad(summed_loss)(w, batch),
  }
  tx = jaxmotion.exchange("data")
  return {
    name: (tx.update(g, tx.init(w))[0], lax.pmean(g, "data"))
    for name, g in gradients.items()
  }


@pytest.mark.parametrize("kind", ["shard_map", "pmap"])
def test_an_exchange_is_the_mean_of_what_it_is_given(kind):
  if kind == "pmap":
    run = jax.pmap(exchange_all, "data", in_axes=(None, 0), out_axes=None)
    found = run(W, BATCH.reshape(4, 2, 3))
  else:
    mapped = functools.partial(jax.shard_map, mesh=MESH, check_vma=False)
    run = mapped(exchange_all, in_specs=(P(), P("data")), out_specs=P())
    found = jax.jit(run)(W, BATCH)
  expected = jax.grad(loss_fn)(W, BATCH)
  ratios = {}
  for name, (exchanged, mean) in found.items():
    # What the trainer had without an exchange, whose mean it takes.
    np.testing.assert_array_equal(exchanged, mean)
    ratios[name] = float(
      np.vdot(exchanged, expected) / np.vdot(expected, expected)
    )
  assert ratios == pytest.approx(
    {
      "own": 1,
      "mean of gradients": 1,
      "sum of gradients": 4,
      "gradient of the mean": 1,
      "gradient of the sum": 4,
    }
  )
