import jax
import numpy as np
import pytest

from jaxmotion.codecs import truncate
from jaxmotion.core import shape_dtype

BYTES = pytest.mark.parametrize("count", [1, 2, 3, 4])
SIGN, MAGNITUDE, INFINITY = 0x80000000, 0x7FFFFFFF, 0x7F800000


def dense():
  """Returns all upper halves of words, and ties of each width."""
  rng = np.random.default_rng(0)
  edges = [
    base + step
    for shift in (8, 16, 23)
    for base in (0, 1 << (shift - 1), 1 << shift, 3 << (shift - 1))
    for step in (-1, 0, 1)
  ]
  mantissas = np.unique(
    np.concatenate([edges, rng.integers(0, 1 << 23, 200)]) % (1 << 23)
  )
  tops = np.arange(512, dtype=np.uint64)[:, None] << np.uint64(23)
  words = (tops | mantissas.astype(np.uint64)).astype(np.uint32)
  upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
  lower = np.uint32([0, 1, 0x00FF, 0x0100, 0x7FFF, 0x8000, 0xFFFF])
  return np.concatenate([words.reshape(-1), (upper | lower).reshape(-1)])


WORDS = dense()
X = WORDS.view(np.float32)
NAN = (WORDS & MAGNITUDE) > INFINITY
INF = (WORDS & MAGNITUDE) == INFINITY


def trip(codec, x=X):
  payload = jax.jit(lambda x: codec.encode(x)[0])(x)
  y = jax.jit(lambda p: codec.decode(p, shape_dtype(x)))(payload)
  return payload, np.asarray(y)


def kept(count):
  return np.uint32((0xFFFFFFFF << (32 - 8 * count)) & 0xFFFFFFFF)


@BYTES
def test_planes_are_the_leading_bytes(count):
  payload, y = trip(truncate(bytes=count))
  words = WORDS & kept(count)
  # The quiet bit of a NaN is set, or its leading bytes may say infinity.
  if count in (2, 3):
    words = np.where(NAN, words | np.uint32(0x00400000), words)
  assert len(payload.planes) == count
  for i, plane in enumerate(payload.planes):
    assert plane.dtype == np.uint8 and plane.shape == X.shape
    np.testing.assert_array_equal(plane, (words >> (24 - 8 * i)) & 0xFF)
  np.testing.assert_array_equal(y.view(np.uint32), words)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("rounding", ["zero", "nearest"])
def test_nan_and_infinity_stay_what_they_are(count, rounding):
  _, y = trip(truncate(bytes=count, rounding=rounding))
  assert np.isnan(y[NAN]).all()
  np.testing.assert_array_equal(y[INF], X[INF])
  assert not np.isnan(y[~NAN]).any()
  if rounding == "zero":
    assert np.isfinite(y[~NAN & ~INF]).all()


@pytest.mark.parametrize("rounding", ["zero", "nearest"])
def test_one_byte_holds_nothing_from_two_to_the_127_up(rounding):
  _, y = trip(truncate(bytes=1, rounding=rounding))
  top = (WORDS & MAGNITUDE) >= 0x7F000000
  expected = np.where(WORDS[top] & SIGN, -(2.0**127), 2.0**127)
  np.testing.assert_array_equal(y[top], expected.astype(np.float32))
  assert np.isfinite(y).all()


@pytest.mark.parametrize("rounding", ["zero", "nearest"])
@BYTES
def test_the_sign_is_never_lost(count, rounding):
  payload, _ = trip(truncate(bytes=count, rounding=rounding))
  np.testing.assert_array_equal(
    np.asarray(payload.planes[0]) >> 7, WORDS >> np.uint32(31)
  )


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nearest_is_the_nearest_word_with_ties_to_even(count):
  _, y = trip(truncate(bytes=count, rounding="nearest"))
  unit = 1 << (32 - 8 * count)
  magnitude = (WORDS & MAGNITUDE).astype(np.int64)
  # Half-even division on the ordered integers that magnitudes are.
  quotient, rest = magnitude // unit, magnitude % unit
  up = (2 * rest > unit) | ((2 * rest == unit) & (quotient % 2 == 1))
  expected = (quotient + up) * unit
  limit = {1: 0x7F000000, 2: INFINITY, 3: INFINITY}[count]
  expected = np.minimum(expected, limit).astype(np.uint32) | (WORDS & SIGN)
  # Another test checks what rounds up past the greatest finite float.
  check = ~NAN & ~((expected & MAGNITUDE == INFINITY) & ~INF)
  np.testing.assert_array_equal(y.view(np.uint32)[check], expected[check])


@pytest.mark.parametrize("count", [2, 3])
def test_nearest_makes_no_finite_value_infinite(count):
  x = np.float32([np.finfo(np.float32).max, -np.finfo(np.float32).max])
  _, y = trip(truncate(bytes=count, rounding="nearest"), x)
  assert np.isfinite(y).all()


@pytest.mark.parametrize(
  ("count", "rounding", "bound"),
  [
    (1, "zero", 3 / 4),
    (2, "zero", 2**-7),
    (3, "zero", 2**-15),
    (4, "zero", 0),
    (2, "nearest", 2**-8),
    (3, "nearest", 2**-16),
  ],
)
def test_relative_errors_are_within_the_stated_bounds(count, rounding, bound):
  _, y = trip(truncate(bytes=count, rounding=rounding))
  # One byte has no word for the least normal exponent.
  least = 0x01000000 if count == 1 else 0x00800000
  normal = (WORDS & MAGNITUDE >= least) & (WORDS & MAGNITUDE < 0x7F000000)
  x, y = X[normal].astype(np.float64), y[normal].astype(np.float64)
  error = np.abs(y - x) / np.abs(x)
  assert error.max() <= bound
  if rounding == "zero":
    assert (np.abs(y) <= np.abs(x)).all()


@BYTES
def test_a_sum_adds_what_each_worker_s_planes_decode_to(count):
  x = np.random.default_rng(0).normal(size=(3, 40)).astype(np.float32)
  codec = truncate(bytes=count)
  payloads, (first, second, third) = trip(codec, x)
  total = codec.sum_decoded(payloads, shape_dtype(x[0]))
  np.testing.assert_array_equal(total, (first + second) + third)


def test_four_bytes_are_lossless():
  _, y = trip(truncate(bytes=4))
  np.testing.assert_array_equal(y.view(np.uint32), WORDS)


@pytest.mark.parametrize("count", [0, 5])
def test_other_widths_are_refused(count):
  with pytest.raises(ValueError, match=r"`bytes` must be .* in \[1, 4\]"):
    truncate(bytes=count)
