import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, collectives
from tests.collectives.helpers import run


@pytest.mark.parametrize("workers", [1, 2, 16, 17, 40])
def test_payloads_of_any_number_of_workers_are_added(workers):
  codec = codecs.uniform(bits=8)
  x = np.random.default_rng(0).normal(size=(workers, 33)).astype(np.float32)
  payloads, _ = jax.vmap(codec.encode)(x)
  decoded = jax.vmap(lambda p: codec.decode(p, x[0]))(payloads)
  total = codec.sum_decoded(payloads, x[0])
  exact = np.asarray(decoded, np.float64).sum(0)
  np.testing.assert_allclose(total, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["gather", "two_phase"])
def test_empty_and_scalar_leaves_are_reduced_too(method):
  x = {
    "none": jnp.zeros((3, 0)),
    "one": jnp.arange(3.0),
    "w": jnp.ones((3, 400)),
  }
  codec = codecs.feedback(codecs.uniform(bits=8))

  def reduce(x):
    state = collectives.all_reduce_init(x, "data", codec, method=method)
    y, _ = collectives.all_reduce(x, "data", codec, state=state, method=method)
    return y

  y = run(reduce, x, 3)
  assert y["none"].shape == (0,)
  np.testing.assert_allclose(y["one"], 1.0, rtol=2.0**-7)
  np.testing.assert_allclose(y["w"], 1.0, rtol=2.0**-14)
