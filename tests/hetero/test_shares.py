import functools
import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from jaxmotion.hetero import fit_speed, ideal_shares, integer_shares, makespan_s


@st.composite
def workers(draw, units=9):
  """Up to 4 workers and as many units as they have room for."""
  n = draw(st.integers(1, 4))
  several = lambda kind: draw(st.lists(kind, min_size=n, max_size=n))
  numbers = lambda low, high: several(st.floats(low, high))
  speeds, fixed_s = numbers(0.1, 10.0), numbers(0.0, 2.0)
  caps = draw(st.lists(st.integers(0, units), min_size=n, max_size=n))
  total = draw(st.integers(0, min(units, sum(caps))))
  return total, speeds, fixed_s, caps


def splits(total, caps):
  for counts in itertools.product(*(range(c + 1) for c in caps)):
    if sum(counts) == total:
      yield counts


@settings(max_examples=60, deadline=None)
@given(workers())
def test_no_split_into_whole_units_is_faster(case):
  total, speeds, fixed_s, caps = case
  ours = integer_shares(total, speeds, fixed_s=fixed_s, caps=caps)
  assert sum(ours) == total
  assert all(n <= c for n, c in zip(ours, caps, strict=True))
  last = functools.partial(makespan_s, speeds=speeds, fixed_s=fixed_s)
  assert last(ours) == min(map(last, splits(total, caps)))


@settings(max_examples=60, deadline=None)
@given(workers())
@example((1, [1.5], [1.0], [1]))
def test_ideal_shares_sum_to_the_total_and_bound_the_whole_ones(case):
  total, speeds, fixed_s, caps = case
  ideal = ideal_shares(total, speeds, fixed_s=fixed_s, caps=caps)
  assert sum(ideal) == pytest.approx(total)
  assert all(-1e-9 <= n <= c + 1e-9 for n, c in zip(ideal, caps, strict=True))
  # Shares of rounding's size are none: they would count as fixed time.
  kept = [n if n > 1e-9 else 0.0 for n in ideal]
  bound = makespan_s(kept, speeds, fixed_s=fixed_s)
  whole = integer_shares(total, speeds, fixed_s=fixed_s, caps=caps)
  assert bound <= makespan_s(whole, speeds, fixed_s=fixed_s) * (1 + 1e-6)


def test_without_fixed_times_shares_and_gain_are_those_of_the_speeds():
  speeds = (3.0, 1.0, 0.5, 7.5)
  shares = ideal_shares(480, speeds)
  np.testing.assert_allclose(shares, 480 * np.array(speeds) / sum(speeds))
  assert integer_shares(480, speeds) == (120, 40, 20, 300)
  for speeds, gain in (((1, 1, 0.5, 0.5), 1.5), ((1, 1, 1, 0.5), 1.75)):
    even = makespan_s((7,) * 4, speeds)
    ideal = makespan_s(ideal_shares(28, speeds), speeds)
    assert even / ideal == pytest.approx(gain)


def test_a_fit_finds_fixed_times_and_too_long_ones_get_nothing():
  n = np.array([1, 2, 4, 8, 16, 32])
  noise = 1 + 0.01 * np.random.default_rng(0).normal(size=n.size)
  speed, fixed_s = fit_speed(n, (0.02 + n / 50) * noise)
  assert speed == pytest.approx(50, rel=0.02)
  assert fixed_s == pytest.approx(0.02, rel=0.1)
  # There is no negative fixed time.
  speed, fixed_s = fit_speed((1, 2, 4), (0.8, 2.0, 4.2))
  assert fixed_s == 0
  assert speed == pytest.approx(1, rel=0.1)
  args, fixed = (4, (1.0, 1.0)), {"fixed_s": (0.0, 9.0)}
  assert ideal_shares(*args, **fixed) == (4.0, 0.0)
  assert integer_shares(*args, **fixed) == (4, 0)
  assert integer_shares(*args, **fixed, min_microbatches=1) == (3, 1)


@pytest.mark.parametrize(
  ("function", "args", "options", "message"),
  [
    (integer_shares, (4, (1.0, -2.0)), {}, r"`speeds` .*got \(1.0, -2.0\)"),
    (ideal_shares, (4, (1.0, np.nan)), {}, "`speeds` must be positive"),
    (ideal_shares, (4, (1.0, 0.0)), {}, "`speeds` must be"),
    (ideal_shares, (4, ("fast",)), {}, "`speeds` .* got .'fast'"),
    (
      integer_shares,
      (4, (1.0, 1.0)),
      {"caps": (1, 2)},
      "`caps` .*which hold 3",
    ),
    (integer_shares, (4, (1.0, 1.0)), {"caps": (4,)}, r"`caps` .*, got \(4,\)"),
    (integer_shares, (1, (1.0,)), {"caps": (1.5,)}, "`caps` must"),
    (ideal_shares, (4, (1.0,)), {"fixed_s": (0.0,) * 3}, "`fixed_s` must be"),
    (
      integer_shares,
      (1, (1.0, 1.0)),
      {"min_microbatches": 1},
      "`min_microbatches` must be at most what 1 .* allow 2 .* got 1",
    ),
    (makespan_s, ((1, 2), (1.0,)), {}, r"`counts` must be 1 .*got \(1, 2\)"),
    (fit_speed, ((2, 2), (1.0, 1.1)), {}, "`counts` must be at"),
    (fit_speed, ((1, 2), (1.0, 0.0)), {}, "`seconds` must be p"),
    (fit_speed, ((1, 2), (9.0, 1.0)), {}, "`seconds` must rise"),
  ],
)
def test_bad_arguments_are_named(function, args, options, message):
  with pytest.raises((TypeError, ValueError), match=message):
    function(*args, **options)
