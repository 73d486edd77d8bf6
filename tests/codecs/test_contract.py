import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import codecs, make_key
from jaxmotion.testing import (
  check_codec,
  check_contraction,
  check_idempotent,
  check_round_trips,
  check_unbiased,
)
from tests.codecs.table import ARRAYS, CODECS, KINDS, ULPS

# Codecs whose docstrings say that sums or products of magnitudes overflow.
OVERFLOW = ("sign", "ternary_threshold", "rotate", "rotate_int4")
SAMPLED = ("random_k", "random_k_plain", "random_k_int8")
NAMES = pytest.mark.parametrize("name", CODECS)


@pytest.mark.parametrize("name", KINDS)
def test_properties_hold_within_the_stated_bound(name):
  codec, bound = CODECS[name]
  x = jnp.asarray(ARRAYS["odd"])
  check_codec(codec, x, bound=bound, ulps=ULPS.get(name, 0))


@NAMES
def test_any_shape_and_width_comes_back_within_the_stated_bound(name):
  codec, bound = CODECS[name]
  arrays = [jnp.asarray(ARRAYS[a]) for a in ("scalar", "empty", "one")]
  arrays += [jnp.asarray(ARRAYS["odd"], d) for d in ("bfloat16", "float16")]
  check_round_trips(codec, arrays, bound=bound)


@functools.cache
def round_trip(name):
  """Returns a jitted round trip; arrays of 65 elements share its program."""
  codec, _ = CODECS[name]

  @jax.jit
  def trip(x):
    payload, _ = codec.encode(x, codec.init(x), make_key(3))
    return codec.decode(payload, x)

  return trip


@NAMES
def test_extreme_elements_stay_finite(name):
  for array in ("zeros", "huge", "subnormal"):
    if array == "huge" and name in (*OVERFLOW, *SAMPLED):
      continue  # overflows where its docstring says so
    y = np.asarray(round_trip(name)(ARRAYS[array]))
    assert np.isfinite(y).all(), array
    most = np.abs(ARRAYS[array]).max() * 1.01 + 1e-37
    assert np.abs(y).max() <= most, array


# One byte holds no non-finite element, and an element that is not drawn is not
# sent, finite or not: their docstrings say so.
@pytest.mark.parametrize(
  "name", [n for n in CODECS if n != "truncate1" and n not in SAMPLED]
)
def test_a_non_finite_element_does_not_vanish(name):
  for value in (np.nan, np.inf, -np.inf):
    x = ARRAYS["odd"].flat[:65]
    x[5] = value
    y = np.asarray(round_trip(name)(x))
    assert not np.isfinite(y).all(), value


# One bit has levels of its own; the widths between round by the same code.
@pytest.mark.parametrize("bits", [1, 2, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_stochastic_rounding_is_unbiased(bits, symmetric):
  codec = codecs.uniform(
    bits=bits, symmetric=symmetric, rounding="stochastic", block=32
  )
  check_unbiased(codec, jnp.asarray(ARRAYS["odd"]))


@pytest.mark.parametrize(
  ("codec", "delta"),
  [
    (codecs.topk(density=0.1), 0.1),
    (codecs.topk(density=0.1, block=40), 0.1),
    (codecs.sign(), 0.5),
    (codecs.uniform(bits=4), 0.9),
  ],
  ids=repr,
)
def test_contractions_contract(codec, delta):
  check_contraction(codec, jnp.asarray(ARRAYS["odd"]), delta)


@pytest.mark.parametrize(
  "name",
  ["identity", "bf16", "f16", "e4m3", "e5m2", "truncate2", "topk_many"],
)
def test_idempotent_codecs_lose_nothing_twice(name):
  check_idempotent(CODECS[name][0], jnp.asarray(ARRAYS["odd"]))
