import json

import numpy as np
import pytest

from jaxmotion.hetero import RebalanceState, integer_shares, rebalance

RNG = np.random.default_rng(0)


def drive(balance, speeds_of, steps, noise=0.0, state=None):
  """States over workers whose units a second are `speeds_of(step)`."""
  state = state or balance.init()
  states = []
  for step in range(steps):
    n = np.array(state.counts, float)
    jitter = 1 + noise * RNG.normal(size=n.size)
    state = balance.update(n / np.array(speeds_of(step)) * jitter, state)
    states.append(state)
  return states


def test_it_settles_on_the_optimum_and_stays():
  balance = rebalance(total=28, workers=4)
  speeds = (10.0, 10.0, 10.0, 5.0)
  assert balance.init(speeds).counts == (8, 8, 8, 4)
  states = drive(balance, lambda _: speeds, 20, 0.02)
  assert states[-1].counts == integer_shares(28, speeds) == (8, 8, 8, 4)
  assert states[-1].changes == 1
  assert balance.speeds(states[-1]) == pytest.approx(speeds, rel=0.05)


def test_a_change_of_speed_is_acted_on_after_most_of_a_window():
  balance = rebalance(total=28, workers=4, window=5)
  slow = lambda step: (1.0, 1.0, 1.0, 1.0 if step < 10 else 0.25)
  states = drive(balance, slow, 40)
  assert {s.counts for s in states[:12]} == {(7, 7, 7, 7)}
  assert states[12].counts == integer_shares(28, slow(12))
  recovered = drive(balance, lambda _: (1.0,) * 4, 3, state=states[-1])
  assert recovered[1].counts == states[-1].counts
  assert recovered[2].counts == (7, 7, 7, 7)


def test_noise_and_one_slow_step_move_nothing():
  speeds = lambda step: (1.0, 1.0, 1.0, 0.1 if step == 10 else 1.0)
  balance = rebalance(total=28, workers=4)
  assert drive(balance, speeds, 30)[-1].changes == 0
  # Equal workers whose times scatter by 3 %.
  calm = drive(rebalance(total=64, workers=4), lambda _: (1.0,) * 4, 300, 0.03)
  assert calm[-1].changes <= 1
  eager = rebalance(total=64, workers=4, min_gain=1e-9, window=1)
  assert drive(eager, lambda _: (1.0,) * 4, 300, 0.03)[-1].changes > 30


def test_fixed_times_are_no_part_of_the_speed():
  balance = rebalance(total=8, workers=2, fixed_s=(0.0, 2.0), window=1)
  state = balance.init()
  assert state.counts == (5, 3)
  state = balance.update((5.0, 2.0 + 6.0), state)
  assert balance.speeds(state) == (1.0, 0.5)
  assert state.counts == (6, 2)


def test_caps_and_least_are_kept_and_who_must_rest_needs_no_measurement():
  balance = rebalance(total=12, workers=3, caps=(4, 12, 12), window=1)
  state = balance.update((0.1, 4.0, 80.0), balance.init())
  assert state.counts == (4, 7, 1)
  balance = rebalance(total=8, workers=3, caps=(8, 8, 0), window=1)
  state = balance.init()
  assert state.counts == (4, 4, 0)
  state = balance.update((1.0, 3.0, float("nan")), state)
  assert state.counts == (6, 2, 0) and state.skipped == 0
  assert balance.speeds(state)[2] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_what_is_no_time_is_skipped_and_counted(bad):
  balance = rebalance(total=8, workers=2, window=1)
  state = balance.update((1.0, bad), balance.init())
  assert state.skipped == 1
  assert state.counts == (4, 4) and balance.speeds(state) == (4.0, 0.0)


def test_state_is_a_value():
  balance = rebalance(total=28, workers=4)
  state = drive(balance, lambda _: (1.0, 1.0, 1.0, 0.5), 8)[-1]
  saved = json.loads(json.dumps(state))
  counts, units, *rest = saved
  again = RebalanceState(tuple(counts), tuple(map(tuple, units)), *rest)
  assert again == state
  times = (1.0, 2.0, 3.0, 4.0)
  assert balance.update(times, again) == balance.update(times, state)


BALANCE = rebalance(total=8, workers=2)


@pytest.mark.parametrize(
  ("call", "message"),
  [
    ({"caps": (3, 4)}, r"`caps` must hold the 8 .*got \(3, 4\), which hold 7"),
    ({"total": 1}, "`min_microbatches` must be"),
    ({"fixed_s": (0.1,) * 3}, "`fixed_s` must be seconds"),
    (lambda: BALANCE.init((1.0, -1.0)), "`speeds` must be positive"),
    (lambda: BALANCE.init((1.0,) * 3), r"`speeds` must be 2 numbers, got \(1"),
    (
      lambda: BALANCE.update((1.0,), BALANCE.init()),
      r"`seconds` must be 2 times, got \(1.0,\)",
    ),
  ],
)
def test_bad_arguments_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    if callable(call):
      call()
    rebalance(**({"total": 8, "workers": 2} | call))
