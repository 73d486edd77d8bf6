import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxmotion.codecs import cast
from jaxmotion.core import shape_dtype

NAMES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
FORMATS = pytest.mark.parametrize("name", NAMES)


def kind(name):
  return np.dtype(getattr(ml_dtypes, name, name))


def word(name):
  return np.uint8 if kind(name).itemsize == 1 else np.uint16


def patterns(name):
  return np.arange(2 ** (8 * kind(name).itemsize)).astype(word(name))


def encode(name, x):
  return jax.jit(lambda x: cast(name).encode(x)[0])(x)


def decode(name, words):
  target = jax.ShapeDtypeStruct(words.shape, jnp.float32)
  payload, _ = jax.eval_shape(cast(name).encode, target)
  return np.asarray(
    jax.jit(lambda w: cast(name).decode(payload._replace(words=w), target))(
      words
    )
  )


@np.errstate(all="ignore")
def grid(name):
  """Returns every finite value, every tie of two, and its neighbors."""
  values = patterns(name).view(kind(name)).astype(np.float64)
  values = np.unique(values[np.isfinite(values)])
  ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
  most = float(ml_dtypes.finfo(kind(name)).max)
  edge = np.float32([most, most * 1.01, most * 2, 3e38, 1e-45, 1e-40])
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
  np.testing.assert_array_equal(
    np.signbit(y)[number], np.signbit(expected)[number]
  )


@FORMATS
def test_values_round_to_nearest_even_and_saturate(name):
  x = grid(name)
  # XLA:CPU takes float32 subnormals for zeros.
  x = x[(x == 0) | (np.abs(x) >= np.finfo(np.float32).tiny)]
  most = float(ml_dtypes.finfo(kind(name)).max)
  with np.errstate(all="ignore"):
    expected = np.clip(x, -most, most).astype(kind(name))
  words = encode(name, x).words
  assert words.dtype == word(name)
  np.testing.assert_array_equal(words, expected.view(word(name)))


@FORMATS
def test_encoding_inverts_decoding(name):
  values = patterns(name).view(kind(name)).astype(np.float32)
  normal = np.abs(values) >= np.finfo(np.float32).tiny
  keep = np.isfinite(values) & (normal | (values == 0))
  words = encode(name, values[keep]).words
  np.testing.assert_array_equal(words, patterns(name)[keep])


@FORMATS
def test_non_finite_values_follow_the_stated_policy(name):
  x = np.array([np.inf, -np.inf, np.nan, -np.nan], np.float32)
  y = decode(name, np.asarray(encode(name, x).words))
  assert np.isnan(y[2:]).all()
  if name == "float8_e4m3fn":
    assert np.isnan(y[:2]).all()
  else:
    np.testing.assert_array_equal(y[:2], x[:2])


@FORMATS
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_inputs_round_as_their_float32_values(name, dtype):
  x = np.random.default_rng(0).normal(size=500) * 10
  narrow = jnp.asarray(x, dtype)
  wide = narrow.astype(jnp.float32)
  np.testing.assert_array_equal(
    encode(name, narrow).words, encode(name, wide).words
  )


@FORMATS
def test_a_word_has_the_width_of_the_format(name):
  payload = encode(name, jnp.zeros((3, 5)))
  assert payload.words.shape == (3, 5)
  assert payload.words.nbytes == 15 * kind(name).itemsize


@FORMATS
def test_a_sum_adds_what_each_worker_s_words_decode_to(name):
  x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
  payloads = encode(name, x)
  total = jax.jit(lambda p: cast(name).sum_decoded(p, shape_dtype(x[0])))(
    payloads
  )
  first, second, third = decode(name, np.asarray(payloads.words))
  np.testing.assert_array_equal(total, (first + second) + third)


@pytest.mark.parametrize("name", ["float32", "int8", "float8_e4m3b11fnuz"])
def test_other_formats_are_refused(name):
  with pytest.raises(ValueError, match="`dtype` must be one of 'bfloat16'"):
    cast(name)


def test_integers_are_refused():
  with pytest.raises(TypeError, match=r"`x` must be .* got int32\[3\]"):
    cast("bfloat16").encode(jnp.zeros(3, jnp.int32))
