import pytest

from experiments.weights import paper, predict
from experiments.weights.predict import BatchTimes, StageShare, TouchedBytes

WEIGHTS = 129_589_833
HALVES = [StageShare(0.5, 0.5), StageShare(0.5, 0.5)]
# 40 of pack, 20 down, 2 unpack, 30 forward, 60 backward, 4 grad_pack, 10 up,
# 6 grad_unpack, 8 update.
BATCH = BatchTimes(40, 20, 2, 30, 60, 4, 10, 6, 8)


def test_rates_follow_from_the_papers_bytes_and_times():
  rates = predict.packing_rates("x86", WEIGHTS)
  # 52.27 / 153.93 of 4 bytes are sent: 1.3583 a weight; with the 4 that are
  # read, 694.4 MB in 19.71 ms on the host and 4.51 ms on the device.
  assert rates.host == pytest.approx(35.23e6, rel=1e-3)
  assert rates.device == pytest.approx(153.96e6, rel=1e-3)


# Batches of fp32 and of a quarter of its bytes are summed up in test_rows.py.
def test_the_papers_own_codec_is_predicted_within_a_per_cent():
  plain, packed = (paper.PROFILES["x86", c] for c in ("fp32", "a2dtwp"))
  sent = 4 * packed.host_to_device / plain.host_to_device
  touched = TouchedBytes(down=sent, pack=4 + sent, unpack=4 + sent)
  batch = predict.predict_batch("x86", WEIGHTS, touched)
  batch = batch._replace(norm=packed.norm)
  assert sum(batch) == pytest.approx(sum(packed), rel=0.01)


def test_overlap_of_two_halves_matches_a_schedule_by_hand():
  # Down: packed at 20 and 40, carried by 30 and 50; computed by 30+16 = 46 and
  # 50+16 = 66. Up: the second half's gradients at 66+32 = 98, carried by 103,
  # updated by 110; the first's at 130, 135, 142.
  assert predict.overlapped_ms(BATCH, HALVES) == 142
  assert predict.overlapped_ms(BATCH._replace(norm=3), HALVES) == 145
  # One stage overlaps nothing.
  assert predict.overlapped_ms(BATCH, [StageShare(1, 1)]) == sum(BATCH)
  # The slowest resource is the bound.
  slow = BATCH._replace(host_to_device=1000)
  many = [StageShare(0.01, 0.01)] * 100
  assert 1000 < predict.overlapped_ms(slow, many) < 1000 + 130


@pytest.mark.parametrize(
  ("name", "gigabytes"),
  # By hand: GT/s a lane x lanes x 128/130 / 8 bits; 3 bricks of 25 GB/s.
  [("pcie3_x8", 7.877), ("pcie5_x16", 63.015), ("nvlink2_x3", 75.0)],
)
def test_links_have_the_bandwidth_of_their_standards(name, gigabytes):
  link = predict.HOST_LINKS[name]
  assert link.bandwidth / 1e9 == pytest.approx(gigabytes, abs=1e-3)
  assert link.source
  # A latency for each transfer, and bytes over bandwidth.
  expected_ms = 1e9 / (gigabytes * 1e6) + 3 * 0.01
  assert link.emulate_ms(1e9, 3) == pytest.approx(expected_ms, rel=1e-3)
