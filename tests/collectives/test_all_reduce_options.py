"""Levels, weights and policies of a reduction."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import HostAxes, codecs, collectives, wire
from tests.collectives.helpers import bind, run
from tests.compilations import compilations
from tests.meshes import mesh_of

X = np.random.default_rng(2).normal(size=(4, 512)).astype(np.float32)
LEVELS = [codecs.uniform(bits=b) for b in (2, 4, 8)]


def program(level_of=lambda level: level):
  def local(x, level):
    y, _ = collectives.all_reduce(
      x[0], "data", LEVELS, level=level_of(level), method="gather"
    )
    return y

  return bind(local, 4, (P("data"), P()))


def test_one_program_serves_every_level_and_sends_only_its_bytes():
  f = program()
  levels = [jnp.int32(i) for i in range(len(LEVELS))]
  before = compilations()
  means = [np.asarray(f(X, level)) for level in levels]
  assert compilations() - before == 1
  errors = [np.abs(mean - X.mean(0)).max() for mean in means]
  assert errors[0] > errors[1] > errors[2]
  compiled = f.lower(X, levels[0]).compile()
  for i, codec in enumerate(LEVELS):
    said = 3 * wire.payload_bytes(codec, X[0])
    traced = wire.step_bytes(f, X, levels[0], branch=i).total_bytes
    real = wire.compiled_bytes(compiled, branch=i).total_bytes
    assert said == traced == real


def test_a_level_that_differs_between_workers_is_an_error():
  with pytest.raises(ValueError, match="`level` must be equal on all workers"):
    program(lambda level: level + lax.axis_index("data"))(X, 0)


def test_workers_agree_on_the_highest():
  highest = program()(X, jnp.int32(2))
  agree = lambda level: collectives.max_over_workers(
    level + lax.axis_index("data") - 1, "data"
  )
  np.testing.assert_array_equal(program(agree)(X, jnp.int32(0)), highest)
  # Under `pmap` they agree by themselves instead of waiting for ever.
  f = jax.pmap(
    lambda x, level: collectives.all_reduce(
      x, "data", LEVELS, level=level, method="gather"
    )[0],
    axis_name="data",
    devices=jax.devices()[:4],
  )
  np.testing.assert_array_equal(f(X, jnp.array([0, 2, 1, 0]))[0], highest)


def test_bad_levels_weights_and_codecs_are_named():
  with pytest.raises(ValueError, match="`weight` must be a scalar, got an arr"):
    call = functools.partial(collectives.all_reduce, weight=jnp.ones(3))
    run(lambda x: call(x, "data")[0], X, 4)
  two = [codecs.uniform(bits=2), codecs.feedback(codecs.uniform(bits=4))]
  for levels, level, error, message in (
    (LEVELS, 3, ValueError, r"`level` must be in \[0, 2\], got 3"),
    (LEVELS, jnp.array([0, 1]), TypeError, r"`level` must be an integer scala"),
    (two, 0, ValueError, "must have codecs with states of the"),
  ):
    call = functools.partial(
      collectives.all_reduce, axis_name="data", codec=levels, level=level
    )
    with pytest.raises(error, match=message):
      run(lambda x, call=call: call(x)[0], X, 4)


ROWS = np.random.default_rng(0).normal(size=(4, 260)).astype(np.float32)
AXES = HostAxes("host", "device")
BOTH = AXES.names
GRID = mesh_of(2, 2, names=BOTH)


def make_mean(axes, on=None, **options):
  names = axes if axes == "data" else BOTH

  def local(x, w):
    return collectives.all_reduce(x[0], axes, weight=w[0], **options)[0]

  specs = dict(in_specs=(P(names), P(names)), out_specs=P())
  return jax.jit(jax.shard_map(local, mesh=on or mesh_of(4), **specs))


MEANS = {
  "flat": make_mean("data"),
  "adaptive": make_mean("data", codec=[codecs.identity()], level=0),
  "hierarchical": make_mean(AXES, GRID),
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
    y = np.asarray(MEANS[name](ROWS, w))
    if expected == "finite":
      share = w.astype(np.float64) / w.astype(np.float64).sum()
      np.testing.assert_allclose(y, share @ ROWS, rtol=1e-5, atol=1e-5)
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

  total, grad = run(local, (ROWS[:, :3], w), 4, (P(), P("data")))
  np.testing.assert_allclose(total, w @ ROWS[:, :3], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(grad, (w / w.sum())[:, None] * np.ones(3))
