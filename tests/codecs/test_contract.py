import jax.numpy as jnp
import pytest

from jaxmotion import codecs
from jaxmotion.testing import (
  check_codec,
  check_round_trips,
  check_unbiased,
  find_breaches,
  make_rows,
)
from tests.codecs.table import ARRAYS, CODECS, KINDS, ULPS, VARIANTS

NAMES = pytest.mark.parametrize("name", CODECS)


@pytest.mark.parametrize("name", KINDS)
def test_properties_and_laws_hold(name):
  # Not a multiple of a block, a word or a row.
  x = jnp.asarray(ARRAYS["odd"].flat[:65])
  check_codec(CODECS[name], x, ulps=ULPS.get(name, 0))


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_laws_hold_in_every_width_and_format(name):
  rows = make_rows(ARRAYS["odd"].flat[:65])
  assert find_breaches(CODECS[name], rows) == []


@NAMES
def test_any_shape_and_width_comes_back_within_the_stated_bound(name):
  arrays = [jnp.asarray(ARRAYS[a]) for a in ("scalar", "empty", "one", "odd")]
  arrays += [jnp.asarray(ARRAYS["odd"], d) for d in ("bfloat16", "float16")]
  # The greatest float stays finite, the least one stays within the bound.
  arrays.append(jnp.asarray(ARRAYS["half"]))
  check_round_trips(CODECS[name], arrays)


# One bit has levels of its own; the widths between round by the same code.
@pytest.mark.parametrize("bits", [1, 2, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_stochastic_rounding_is_unbiased(bits, symmetric):
  codec = codecs.uniform(
    bits=bits, symmetric=symmetric, rounding="stochastic", block=32
  )
  check_unbiased(codec, jnp.asarray(ARRAYS["odd"]))
