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


def test_one_program_serves_every_level():
  f = program()
  levels = [jnp.int32(i) for i in range(len(LEVELS))]
  before = compilations()
  means = [np.asarray(f(X, level)) for level in levels]
  assert compilations() - before == 1
  errors = [np.abs(mean - X.mean(0)).max() for mean in means]
  assert errors[0] > errors[1] > errors[2]


def test_a_level_sends_only_its_own_bytes():
  f = program()
  compiled = f.lower(X, jnp.int32(0)).compile()
  for i, codec in enumerate(LEVELS):
    said = 3 * wire.payload_bytes(codec, X[0])
    traced = wire.step_bytes(f, X, jnp.int32(0), branch=i).total_bytes
    real = wire.compiled_bytes(compiled, branch=i).total_bytes
    assert said == traced == real


def test_a_level_that_differs_between_workers_is_an_error():
  with pytest.raises(ValueError, match="`level` must be equal on all workers"):
    program(lambda level: level + lax.axis_index("data"))(X, 0)


def test_workers_can_agree_on_the_highest():
  agree = lambda level: collectives.max_over_workers(
    level + lax.axis_index("data") - 1, "data"
  )
  y = program(agree)(X, jnp.int32(0))
  np.testing.assert_array_equal(y, program()(X, jnp.int32(2)))


@pytest.mark.parametrize(
  ("level", "error", "message"),
  [
    (1.0, TypeError, r"`level` must be an integer scalar, got float32\[\]"),
    (3, ValueError, r"`level` must be in \[0, 2\], got 3"),
    (jnp.array([0, 1]), TypeError, r"`level` must be an integer scalar"),
  ],
)
def test_bad_levels_are_named(level, error, message):
  def local(x):
    return collectives.all_reduce(x, "data", LEVELS, level=level)[0]

  with pytest.raises(error, match=message):
    run(local, X, 4)


def test_codecs_that_do_not_share_a_state_are_named():
  mixed = [codecs.uniform(bits=2), codecs.feedback(codecs.uniform(bits=4))]
  with pytest.raises(ValueError, match="must have codecs with states of the"):
    run(lambda x: collectives.all_reduce(x, "data", mixed, level=0)[0], X, 4)


def test_under_pmap_workers_agree_instead_of_waiting_for_ever():
  f = jax.pmap(
    lambda x, level: collectives.all_reduce(
      x, "data", LEVELS, level=level, method="gather"
    )[0],
    axis_name="data",
    devices=jax.devices()[:4],
  )
  y = np.asarray(f(X, jnp.array([0, 2, 1, 0])))
  np.testing.assert_array_equal(y[0], program()(X, jnp.int32(2)))
