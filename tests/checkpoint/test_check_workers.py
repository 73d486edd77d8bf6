"""Error memory that was copied to all workers is found."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils

import jaxmotion
from jaxmotion import checkpoint, codecs

DEVICES = jax.devices()[:4]
X = np.random.default_rng(0).normal(size=(4, 2, 3)).astype(np.float32)


def test_a_state_that_was_replicated_again_is_refused():
  codec = codecs.feedback(codecs.topk(density=0.3))
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1))
  params = jnp.ones(3)

  def step(state, x):
    grads = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(params)
    return tx.update(grads, state, params)[1]

  run = jax.pmap(step, "data", devices=DEVICES)
  first = jax.pmap(lambda _: tx.init(params), "data", devices=DEVICES)(X)
  checkpoint.check_workers(first)  # Zeros are equal.
  checkpoint.check_workers(jax_utils.replicate(jax_utils.unreplicate(first)))
  state = run(first, X)
  checkpoint.check_workers({"state": state, "step": 1})
  copied = jax_utils.replicate(jax_utils.unreplicate(state), DEVICES)
  with pytest.raises(ValueError, match="one memory for all 4 at '0/codec_sta"):
    checkpoint.check_workers(copied)
  with pytest.raises(ValueError, match="keep per-worker state whole"):
    checkpoint.check_workers(run(copied, X[:1].repeat(4, 0)))
  # As the page says: the optimizer's state stays whole.
  whole = jax.device_put(jax.device_get(state))
  checkpoint.check_workers(whole)
  checkpoint.check_workers(jax_utils.unreplicate(state))  # One worker's own.


def test_a_state_without_values_is_refused():
  like = jaxmotion.PerWorker(jax.ShapeDtypeStruct((4, 3), jnp.float32))
  with pytest.raises(TypeError, match="`state` must have arrays with values"):
    checkpoint.check_workers(like)
