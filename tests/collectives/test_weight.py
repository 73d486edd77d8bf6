"""Weights of workers, against the formula in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion import HostAxes, codecs, collectives
from tests.collectives.helpers import mesh, run

X = np.random.default_rng(0).normal(size=(4, 260)).astype(np.float32)
AXES = HostAxes("host", "device")
BOTH = AXES.names
GRID = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), BOTH)


def make_program(axes, on=None, **options):
  names = axes if axes == "data" else BOTH

  def local(x, w):
    return collectives.all_reduce(x[0], axes, weight=w[0], **options)[0]

  specs = dict(in_specs=(P(names), P(names)), out_specs=P())
  return jax.jit(jax.shard_map(local, mesh=on or mesh(4), **specs))


MEANS = {
  "flat": make_program("data"),
  "adaptive": make_program("data", codec=[codecs.identity()], level=0),
  "hierarchical": make_program(AXES, GRID),
}
WEIGHTS = [
  ([1, 1, 1, 1], "finite"),
  ([1, 0, 2, 5], "finite"),
  ([-1, -1, -1, -1], "finite"),
  ([1, 1, 1, -4], "finite"),
  ([3e38] * 4, "finite"),
  ([1e-36, 0, 1e-36, 2e-36], "finite"),
  ([0, 0, 0, 0], "zero"),
  ([1, 1, 1, -3], "not finite"),
  ([1, float("nan"), 1, 1], "not finite"),
  ([0, float("nan"), 0, 0], "not finite"),
  ([1, float("inf"), 1, 1], "not finite"),
]


@pytest.mark.parametrize("name", MEANS)
def test_the_mean_is_the_formulas_for_any_weights(name):
  for weights, expected in WEIGHTS:
    w = np.array(weights, np.float32)
    y = np.asarray(MEANS[name](X, w))
    if expected == "finite":
      share = w.astype(np.float64) / w.astype(np.float64).sum()
      np.testing.assert_allclose(y, share @ X, rtol=1e-5, atol=1e-5)
    elif expected == "zero":
      np.testing.assert_array_equal(y, 0)
    else:
      assert not np.isfinite(y).any(), weights


def test_shares_of_narrow_gradients_add_up_to_one():
  ones = np.ones((4, 8), "bfloat16")
  w = np.array([0.3, 0.7, 1.9, 3.1], np.float32)

  def local(a):
    codec = codecs.uniform(bits=8)
    return collectives.all_reduce(a[0], "data", codec, weight=a[1])[0]

  y = run(local, (ones, w), 4)
  assert y.dtype == jnp.bfloat16
  np.testing.assert_array_equal(np.asarray(y, np.float32), 1)


def test_a_weighted_sum_is_not_divided_and_gradients_are_shares():
  w = np.array([1.0, 0.0, -2.0, 5.0], np.float32)

  def local(a):
    x, weight = a
    reduce = lambda x, op: collectives.all_reduce(
      x, "data", op=op, weight=weight
    )[0]
    grad = jax.grad(lambda x: reduce(x, "mean").sum())(x)
    return reduce(x, "sum"), grad[None]

  total, grad = run(local, (X[:, :3], w), 4, (P(), P("data")))
  np.testing.assert_allclose(total, w @ X[:, :3], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(grad, (w / w.sum())[:, None] * np.ones(3))


@pytest.mark.parametrize(
  ("weight", "error", "message"),
  [
    (np.float32("inf"), ValueError, "`weight` must be finite, got .*inf"),
    (jnp.ones(3), ValueError, r"`weight` must be a scalar, got an array float"),
    (True, TypeError, "`weight` must be a real number, got True"),
    (1j, TypeError, "`weight` must be a real number, got 1j"),
    ([[1], [1, 2]], TypeError, "`weight` must be a scalar, got"),
  ],
)
def test_bad_weights_are_named(weight, error, message):
  with pytest.raises(error, match=message):
    run(lambda x: collectives.all_reduce(x, "data", weight=weight)[0], X, 4)
