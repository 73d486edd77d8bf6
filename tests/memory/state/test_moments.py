"""Which fields of an optimizer's state are encoded, and how."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import codecs
from jaxmotion.memory import EncodedLeaf, compress_state, decompress_state
from tests.memory.state.digits import learn_digits

RNG = np.random.default_rng(0)


def encoded_codecs(tx, params):
  """Returns the codec of each encoded leaf, by its path."""
  state = jax.eval_shape(tx.init, params).inner
  leaves = jax.tree.leaves_with_path(
    state, is_leaf=lambda x: isinstance(x, EncodedLeaf)
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): x.codec
    for path, x in leaves
    if isinstance(x, EncodedLeaf)
  }


def test_accumulators_of_adafactor_and_adagrad_are_encoded():
  params = {
    "w": jax.ShapeDtypeStruct((5000, 128), jnp.float32),
    "b": jax.ShapeDtypeStruct((5000,), jnp.float32),
  }
  adafactor = compress_state(optax.adafactor(1e-2, momentum=0.9))
  found = encoded_codecs(adafactor, params)
  second = codecs.nonnegative(rounding="stochastic")
  # Of a factored matrix the row and the column, here one of them is small.
  assert {path for path, codec in found.items() if codec == second} == {
    "0/v_col/w",
    "0/v/b",
  }
  assert {path for path in found if "ema" in path} == {"4/ema/b", "4/ema/w"}
  adagrad = encoded_codecs(compress_state(optax.adagrad(1e-2)), params)
  wide = codecs.nonnegative(bits=16, rounding="stochastic")
  assert adagrad == {f"0/sum_of_squares/{name}": wide for name in "bw"}


def test_a_field_v_of_another_optimizer_is_no_second_moment():
  class Signed(NamedTuple):
    mu: Any
    v: Any

  tx = optax.GradientTransformation(
    lambda params: Signed(params, params),
    lambda updates, state, params=None: (updates, state),
  )
  params = {"kernel": jnp.ones((64, 64))}
  assert set(encoded_codecs(compress_state(tx), params)) == {"mu/kernel"}


def test_a_sum_of_squares_keeps_its_relative_accuracy():
  steps = 600
  grads = jnp.asarray(
    RNG.normal(size=(steps, 64)) * 10.0 ** RNG.uniform(-2, 2, 64)
  )

  def run(tx):
    def step(state, g):
      return tx.update({"w": g}, state)[1], None

    return jax.lax.scan(step, tx.init({"w": grads[0]}), grads)[0]

  @jax.jit
  def both():
    plain = optax.scale_by_rss()
    wide = compress_state(plain, min_leaf_size=0)
    narrow = compress_state(plain, sums=codecs.nonnegative(), min_leaf_size=0)
    return (
      run(plain).sum_of_squares["w"],
      decompress_state(run(wide)).inner.sum_of_squares["w"],
      decompress_state(run(narrow)).inner.sum_of_squares["w"],
    )

  exact, wide, narrow = map(np.asarray, both())
  error = wide / exact - 1
  # The roundings of a random walk, 2^-12 of the sum each at the most likely.
  assert np.abs(error).max() < 0.1 and abs(error.mean()) < 0.01
  # Eight bits to nearest do not grow any more.
  assert np.median(narrow / exact) < 0.5


def test_adafactor_learns_digits_as_well_with_encoded_state():
  tx = optax.adafactor(1e-2, min_dim_size_to_factor=100, momentum=0.9)
  expected, expected_loss = learn_digits(tx, steps=100)
  found, found_loss = learn_digits(
    compress_state(tx, min_leaf_size=100), steps=100
  )
  assert expected.min() > 0.93
  assert np.abs(found - expected).max() <= 0.01
  assert found_loss.max() < 1.2 * expected_loss.max()
