import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxmotion import codecs, collectives, wire
from tests.collectives.helpers import bind, run
from tests.compilations import compilations

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


def test_bad_levels_and_codecs_are_named():
  two = [codecs.uniform(bits=2), codecs.feedback(codecs.uniform(bits=4))]
  for levels, level, error, message in (
    (LEVELS, 1.0, TypeError, r"`level` must be an integer scalar, got float32"),
    (LEVELS, 3, ValueError, r"`level` must be in \[0, 2\], got 3"),
    (LEVELS, jnp.array([0, 1]), TypeError, r"`level` must be an integer scala"),
    (two, 0, ValueError, "must have codecs with states of the"),
  ):
    call = functools.partial(
      collectives.all_reduce, axis_name="data", codec=levels, level=level
    )
    with pytest.raises(error, match=message):
      run(lambda x, call=call: call(x)[0], X, 4)
