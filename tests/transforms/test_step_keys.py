"""Keys of a training step: each worker and each step has its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jaxmotion
from jaxmotion import transforms

WORKERS = 4
BATCH = np.ones((8, 5), np.float32)
TX = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.0))


def loss_fn(params, batch, key):
  """A dropout of inputs, whose mask is the auxiliary value."""
  mask = jax.random.bernoulli(key, 0.5, batch.shape)
  return jnp.mean(jnp.where(mask, batch * params, 0)), mask


def make_step(tx=TX, kind=AxisType.Auto):
  mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(kind,))
  return jaxmotion.make_train_step(
    loss_fn, tx, mesh, has_aux=True, donate=False
  )


def expected_masks(key, count):
  step_key = jax.random.fold_in(key, count)
  return [
    jax.random.bernoulli(jax.random.fold_in(step_key, worker), 0.5, (2, 5))
    for worker in range(WORKERS)
  ]


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("make_key", (jax.random.key, jax.random.PRNGKey))
def test_every_worker_and_step_draws_its_own_mask(kind, make_key):
  init, step = make_step(kind=kind)
  state = init(jnp.ones(()))
  key, masks = make_key(7), []
  for count in range(2):
    state, (_, mask) = step(state, BATCH, key=key)
    np.testing.assert_array_equal(mask, expected_masks(key, count))
    masks += [m.tobytes() for m in np.asarray(mask)]
  assert len(set(masks)) == 2 * WORKERS


WRAPPED = transforms.skip_nonfinite(
  optax.chain(
    optax.masked(jaxmotion.exchange("data"), True),
    optax.inject_hyperparams(optax.adam)(0.1),
  ),
  "data",
)
SHARDED = jaxmotion.sharded("data", optax.sgd(0.0))


@pytest.mark.parametrize("tx", (WRAPPED, SHARDED), ids=("wrapped", "sharded"))
def test_the_count_is_found_inside_of_wrappers_and_of_sharded(tx):
  init, step = make_step(tx)
  state, key = init(jnp.ones(())), jax.random.key(3)
  state, _ = step(state, BATCH, key=key)
  _, (_, mask) = step(state, BATCH, key=key)
  np.testing.assert_array_equal(mask, expected_masks(key, 1))


@pytest.mark.parametrize(
  "key",
  (3, np.zeros(2, np.float32), "text", jax.random.split(jax.random.key(0))),
)
def test_what_is_no_key_is_refused(key):
  init, step = make_step()
  with pytest.raises(TypeError, match=r"`key` must be .*jax\.random\.key"):
    step(init(jnp.ones(())), BATCH, key=key)
