import functools

import numpy as np
import pytest

from jaxmotion.codecs import truncate
from jaxmotion.core import shape_dtype
from tests.codecs.jitted import normal, trip

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
  drawn = np.concatenate([edges, rng.integers(0, 1 << 23, 200)])
  mantissas = np.unique(drawn % (1 << 23))
  tops = np.arange(512, dtype=np.uint64)[:, None] << np.uint64(23)
  words = (tops | mantissas.astype(np.uint64)).astype(np.uint32)
  upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << np.uint32(16)
  lower = np.uint32([0, 1, 0x00FF, 0x0100, 0x7FFF, 0x8000, 0xFFFF])
  return np.concatenate([words.reshape(-1), (upper | lower).reshape(-1)])


WORDS = dense()
X = WORDS.view(np.float32)
NAN = (WORDS & MAGNITUDE) > INFINITY
INF = (WORDS & MAGNITUDE) == INFINITY


@functools.cache
def tripped(count, rounding="zero"):
  """Returns the payload of all words, and what it decodes to."""
  return trip(truncate(bytes=count, rounding=rounding), X)


@BYTES
def test_planes_are_the_leading_bytes(count):
  payload, y = tripped(count)
  words = WORDS & np.uint32((0xFFFFFFFF << (32 - 8 * count)) & 0xFFFFFFFF)
  # The quiet bit of a NaN is set, or its leading bytes may say infinity.
  if count in (2, 3):
    words = np.where(NAN, words | np.uint32(0x00400000), words)
  assert len(payload.planes) == count
  for i, plane in enumerate(payload.planes):
    assert plane.dtype == np.uint8 and plane.shape == X.shape
    np.testing.assert_array_equal(plane, (words >> (24 - 8 * i)) & 0xFF)
  np.testing.assert_array_equal(y.view(np.uint32), words)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_is_not_finite_and_all_signs_stay_where_rounding_is_nearest(count):
  _, y = tripped(count, "nearest")
  np.testing.assert_array_equal(np.signbit(y), np.signbit(X))
  # The greatest floats do not round up.
  assert np.isfinite(y[~NAN & ~INF]).all()
  if count == 1:  # There is nothing from 2^127 up.
    assert (np.abs(y[NAN | INF]) == 2.0**127).all()
  else:
    np.testing.assert_array_equal(np.isnan(y), NAN)
    np.testing.assert_array_equal(y[INF], X[INF])


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nearest_is_the_nearest_word_with_ties_to_even(count):
  _, y = tripped(count, "nearest")
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


@pytest.mark.parametrize("count", [1, 3])
def test_a_sum_adds_what_each_worker_s_planes_decode_to(count):
  x = normal(3, 40)
  codec = truncate(bytes=count)
  payloads, (first, second, third) = trip(codec, x)
  total = codec.sum_decoded(payloads, shape_dtype(x[0]))
  np.testing.assert_array_equal(total, (first + second) + third)
