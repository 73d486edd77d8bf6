import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jaxmotion.codecs import random_k
from jaxmotion.core import make_key
from tests.codecs.jitted import normal

DENSITIES = pytest.mark.parametrize("density", [0.01, 0.3, 1.0])


def decoded(codec, x, draws):
  def once(i):
    return codec.decode(codec.encode(x, (), make_key(i))[0], x)

  return np.asarray(jax.jit(jax.vmap(once))(jnp.arange(draws)), np.float64)


@DENSITIES
def test_exactly_k_values_travel(density):
  codec, x = random_k(density=density, scaled=False), normal(101)
  k = max(1, round(density * 101))
  for y in decoded(codec, x, 20):
    assert (y != 0).sum() == k
    # A projection: the elements that are kept are not changed.
    assert (y[y != 0] == x[y != 0]).all()


@DENSITIES
def test_scaled_error_is_the_stated_one(density):
  codec, x, draws = random_k(density=density), normal(101), 1000
  k = max(1, round(density * 101))
  short, longer = divmod(101, k)
  sizes = np.repeat([short + 1, short], [longer, k - longer])
  expected = (np.repeat(sizes - 1, sizes) * x.astype(np.float64) ** 2).sum()
  errors = ((decoded(codec, x, draws) - x) ** 2).sum(1)
  spread = errors.std() / np.sqrt(draws)
  assert abs(errors.mean() - expected) <= 5 * spread + 1e-6 * expected
  assert expected <= (-(-101 // k) - 1) * (x.astype(np.float64) ** 2).sum()


def test_positions_do_not_depend_on_the_worker():
  x = normal(1000)
  codec = random_k(density=0.1)
  a, b = (codec.encode(x, (), make_key(5, w))[0] for w in (0, 1))
  np.testing.assert_array_equal(a.values, b.values)
  c, _ = codec.encode(x, (), make_key(6))
  assert (np.asarray(a.values) != np.asarray(c.values)).any()


def test_summed_payloads_decode_to_the_sum():
  mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
  codec, x = random_k(density=0.1), normal(4, 1000)

  def total(x):
    key = make_key(5, lax.axis_index("d"))
    payload, _ = codec.encode(x[0], (), key)
    # The seed passes as equal on all workers: check_vma would refuse it else.
    summed = payload._replace(values=lax.psum(payload.values, "d"))
    return codec.decode(summed, x[0])

  spread = jax.shard_map(total, mesh=mesh, in_specs=P("d"), out_specs=P())
  one_by_one = sum(
    np.asarray(codec.decode(codec.encode(row, (), make_key(5))[0], row))
    for row in x
  )
  # Four float32 additions in some order.
  found = jax.jit(spread)(x)
  np.testing.assert_allclose(found, one_by_one, rtol=1e-5, atol=1e-4)
