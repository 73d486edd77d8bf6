import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmotion.codecs import cast
from jaxmotion.core import shape_dtype
from tests.codecs import jitted

NAMES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
FORMATS = pytest.mark.parametrize("name", NAMES)


def kind(name):
  return np.dtype(getattr(ml_dtypes, name, name))


def patterns(name):
  size = kind(name).itemsize
  return np.arange(2 ** (8 * size)).astype(np.uint8 if size == 1 else np.uint16)


def encode(name, x):
  return jitted.encode(cast(name), x)[0]


def decode(name, words):
  like = jnp.zeros(words.shape)
  payload = cast(name).payload_like(like)._replace(words=words)
  return np.asarray(jitted.decode(cast(name), payload, like))


@np.errstate(all="ignore")
def grid(name):
  """Returns every finite value, every tie of two, and its neighbors."""
  values = patterns(name).view(kind(name)).astype(np.float64)
  values = np.unique(values[np.isfinite(values)])
  ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
  most = float(ml_dtypes.finfo(kind(name)).max)
  edge = np.float32([0, most, most * 1.01, most * 2, 3e38, 1e-45, 1e-40])
  x = np.concatenate([values.astype(np.float32), ties, edge, -edge])
  steps = [np.nextafter(x, np.float32(s * np.inf)) for s in (-1, 1)]
  x = np.concatenate([x, *steps])
  return x[np.isfinite(x)]


@FORMATS
def test_every_word_decodes_to_its_value(name):
  words = patterns(name)
  expected = words.view(kind(name)).astype(np.float32)
  y = decode(name, words)
  np.testing.assert_array_equal(y, expected)
  number = ~np.isnan(expected)
  signs = np.signbit(expected)[number]
  np.testing.assert_array_equal(np.signbit(y)[number], signs)


@FORMATS
def test_values_round_to_nearest_even_and_saturate(name):
  x = grid(name)
  # XLA:CPU takes float32 subnormals for zeros.
  x = x[(x == 0) | (np.abs(x) >= np.finfo(np.float32).tiny)]
  most = float(ml_dtypes.finfo(kind(name)).max)
  with np.errstate(all="ignore"):
    expected = np.clip(x, -most, most).astype(kind(name))
  words = encode(name, x).words
  assert words.dtype == patterns(name).dtype and words.shape == x.shape
  np.testing.assert_array_equal(words, expected.view(words.dtype))


@FORMATS
def test_non_finite_values_follow_the_stated_policy(name):
  x = np.array([np.inf, -np.inf, np.nan, -np.nan], np.float32)
  _, y = jitted.trip(cast(name), x)
  assert np.isnan(y[2:]).all()
  if name == "float8_e4m3fn":
    assert np.isnan(y[:2]).all()
  else:
    np.testing.assert_array_equal(y[:2], x[:2])


@pytest.mark.parametrize("name", NAMES[::2])
def test_a_sum_adds_what_each_worker_s_words_decode_to(name):
  x = jitted.normal(3, 40)
  payloads, (first, second, third) = jitted.trip(cast(name), x)
  add_up = jax.jit(lambda p: cast(name).sum_decoded(p, shape_dtype(x[0])))
  total = add_up(payloads)
  np.testing.assert_array_equal(total, (first + second) + third)
