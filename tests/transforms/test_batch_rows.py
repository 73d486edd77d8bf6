"""Batches whose leaves have other numbers of rows, and batches without any."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jaxmotion import transforms

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
PARAMS = np.ones((5, 1), np.float32)


def make_batch(rows_x, rows_y):
  rng = np.random.default_rng(0)
  return {
    "x": rng.normal(size=(rows_x, 5)).astype(np.float32),
    "y": rng.normal(size=(rows_y, 1)).astype(np.float32),
  }


def loss_fn(params, batch):
  y = batch["x"] @ transforms.gather_params(params)
  return jnp.mean((y - batch["y"]) ** 2)


def exchange(rate):
  return optax.chain(transforms.exchange("data"), optax.sgd(rate))


SCHEMES = {
  "exchange": lambda: exchange(0.1),
  "local_updates": lambda: transforms.local_updates(
    optax.sgd(0.1), exchange(0.7), every=2
  ),
  "fully_sharded": lambda: transforms.fully_sharded(optax.sgd(0.1)),
}


def train(scheme, batch, microbatches=1):
  init, step = transforms.make_train_step(
    loss_fn, SCHEMES[scheme](), MESH, microbatches=microbatches
  )
  return step(init(PARAMS), batch)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("rows_x", "rows_y"), [(12, 4), (16, 8)])
def test_leaves_with_other_numbers_of_rows_are_refused(scheme, rows_x, rows_y):
  message = (
    "`batch` must have leaves with as many rows as one another, got "
    f"{rows_x} at `x` and {rows_y} at `y`"
  )
  with pytest.raises(ValueError, match=message):
    train(scheme, make_batch(rows_x, rows_y))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
  ("batch", "got"),
  [
    (make_batch(0, 0), r"got shape \(0, 5\) at `x`"),
    ({}, r"got \{\}"),
    (None, "got None"),
  ],
)
def test_a_batch_without_rows_is_refused(scheme, batch, got):
  with pytest.raises(ValueError, match=f"`batch` must .*{got}"):
    train(scheme, batch)


def test_scalars_and_keys_have_no_rows():
  def noisy_loss(params, batch):
    noise = jax.random.normal(batch["key"][0], ())
    return loss_fn(params, batch) * batch["scale"] + noise

  init, step = transforms.make_train_step(noisy_loss, exchange(0.1), MESH)
  keys = jax.random.split(jax.random.key(0), 4)
  batch = make_batch(8, 8) | {"key": keys, "scale": 2.0}
  _, loss = step(init(PARAMS), batch)
  assert np.isfinite(loss)


def test_arguments_of_a_step_of_ones_own_may_have_other_numbers_of_rows():
  @transforms.parallelize_step(MESH, batch=("batch", "table", "extra"))
  def step(params, batch, table, extra=None):
    return {"loss": loss_fn(params, batch) + jnp.sum(table)}

  x, table = make_batch(8, 8), np.ones((4, 2), np.float32)
  step(PARAMS, x, table)
  with pytest.raises(ValueError, match="`batch` .* 12 at `x` and 4 at `y`"):
    step(PARAMS, make_batch(12, 4), table)
  with pytest.raises(ValueError, match=r"`table` must .* got shape \(0, 2\)"):
    step(PARAMS, x, table[:0])
  with pytest.raises(ValueError, match=r"`table` must .* got \{\}"):
    step(PARAMS, x, {})
