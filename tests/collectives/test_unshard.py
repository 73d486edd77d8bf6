"""Sharded weights that are gathered for use, on real (emulated) workers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, make_key
from jaxmotion.collectives import unshard
from tests.collectives.helpers import run

RNG = np.random.default_rng(0)
INT8, INT4 = codecs.uniform(bits=8), codecs.uniform(bits=4)


def test_weights_that_are_tied_or_unused_keep_the_law():
  error = RNG.normal(size=(2, 2, 8, 6)).astype(np.float32) / 10
  part = RNG.normal(size=(2, 2, 8, 3)).astype(np.float32)

  def changes(own):
    part, error = own

    def loss(part, error):
      tied, _unused = (
        unshard(p, "data", INT8, INT4, axis=1, error=e)
        for p, e in zip(part, error, strict=True)
      )
      again = unshard(part[0], "data", INT8, INT4, axis=-1, error=error[0])
      return jnp.sum(tied**2) + jnp.sum(again**3)

    grads, change = jax.grad(loss, argnums=(0, 1))(part, error)
    whole = unshard(part[0], "data", INT8, axis=1)
    own = 2 * whole + 3 * whole**2
    left = lax.pmean(own - change[0], "data")
    return left, lax.all_gather(grads, "data", to="invarying"), change[1]

  left, grads, unused = run(changes, (part, error), 2, (P(), P(), P("data")))
  # Two uses read the memory twice, so what was sent has it twice.
  sent = np.concatenate([grads[0, 0], grads[1, 0]], axis=1)
  np.testing.assert_allclose(sent, left, atol=1e-5)
  assert not np.any(unused)


def test_what_is_remembered_is_sent_with_the_next_gradient():
  error = RNG.normal(size=(2, 8, 4)).astype(np.float32)
  part = np.zeros((2, 4, 4), np.float32)

  def changes(own):
    loss = lambda part, error: 0 * jnp.sum(unshard(part, "data", error=error))
    grads, change = jax.grad(loss, argnums=(0, 1))(*own)
    return grads, change[None]

  sent, change = run(changes, (part, error), 2, (P("data"), P("data")))
  np.testing.assert_allclose(sent, error.mean(0), rtol=1e-6)
  np.testing.assert_array_equal(change, -error)


def test_all_workers_hold_the_same_bits_with_random_rounding():
  codec = codecs.uniform(bits=4, rounding="stochastic")
  part = RNG.normal(size=(3, 4, 5)).astype(np.float32)

  def whole(part):
    key = make_key(0, lax.axis_index("data"))
    return unshard(part, "data", codec, key=key)[None]

  found = np.asarray(run(whole, part, 3, P("data")))
  assert found.shape == (3, 12, 5)
  assert len({w.tobytes() for w in found}) == 1
  assert np.abs(found[0] - part.reshape(12, 5)).max() < np.abs(part).max() / 7


def test_wrong_uses_say_what_is_wrong():
  part = np.zeros((2, 4, 4), np.float32)
  memory = codecs.feedback(INT4)
  with pytest.raises(ValueError, match="`gradient_codec` must be .* state"):
    run(lambda p: unshard(p, "data", INT8, memory), part, 2)
  with pytest.raises(ValueError, match=r"`error` must have the shape \(8, 4\)"):
    run(lambda p: unshard(p, "data", error=p), part, 2)
