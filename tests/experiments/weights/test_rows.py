import pytest

from experiments.common.tables import index_rows
from experiments.weights import (
  paper,
  predict,
  profile as weights_profile,
  rows as weights_rows,
  trainer,
)

CURVE = [(5, 50.0), (10, 9.0), (15, 11.0), (20, 3.0)]
RUN = trainer.Run(
  *("fp32", 0, 3.0, 0.1, 20, CURVE, 4_000_000, 4e6, 4e6, 20.0, 0.0),
  groups=["a", "b"],
  switches=[[0, 0, 0], [0, 1, 0]],
)
RUNS = [
  RUN,
  RUN._replace(seed=1, error=4.0, curve=[(5, 50.0), (10, 20.0), (15, 8.0)]),
  RUN._replace(case="int8", sent_bytes=1e6, returned_bytes=1e6, step_ms=30.0),
  RUN._replace(
    case="awp",
    sent_bytes=1e6,
    error=60.0,
    curve=[(5, 70.0), (20, 60.0)],
    switches=[*RUN.switches, [7, 1, 1]],
  ),
]
PROFILE = weights_profile.Profile(
  "fp32",
  {part: float(i) for i, part in enumerate(weights_profile.PARTS, 1)},
  step_ms=40.0,
  norm_ratio=0.2,
  norm_share=1.5,
  pack_ratio=0.1,
  noise_ms=2.0,
  **dict.fromkeys(("plain_bytes", "sent_bytes", "returned_bytes"), 8_000_000),
  **dict.fromkeys(("sends", "returns"), 10),
)
PROFILES = [
  PROFILE,
  PROFILE._replace(
    case="int8", sent_bytes=2_000_000, returned_bytes=2_000_000, pack_ratio=1.6
  ),
  PROFILE._replace(case="awp", sent_bytes=2_000_000, pack_ratio=1.0),
]
WEIGHTS = 129_589_833


def make_rows(on_host=True):
  halves = [predict.StageShare(0.5, 0.5)] * 2
  cases = weights_rows.summarize_cases(
    RUNS, PROFILES, 10.0, WEIGHTS, halves, on_host=on_host
  )
  return weights_rows.make_rows("weights_vgg", cases, "vgg_a")


def test_metrics_are_means_over_seeds_and_ratios_of_bytes():
  steps = [weights_rows.steps_to_error(run, 10.0) for run in RUNS]
  assert steps == [10, 15, 10, None]
  cells = index_rows(make_rows())
  fp32 = cells["fp32", "test_accuracy"]
  assert (fp32.value, fp32.noise) == (96.5, pytest.approx(0.5**0.5))
  assert cells["int8", "test_accuracy"].baseline == 96.5
  assert cells["fp32", "steps_to_error"].value == 12.5
  assert cells["int8", "sent_ratio"].value == 4
  assert cells["awp", "returned_ratio"].value == 1
  assert cells["awp", "switches"].value == 1
  # A case that misses the threshold has no time.
  assert not [m for c, m in cells if c == "awp" and "to_error" in m]
  # Rows of the paper name it.
  row = cells["paper_x86_a2dtwp", "host_to_device_ms"]
  assert (row.value, row.machine) == (52.27, paper.SOURCE)
  best = cells["paper_x86_best_static", "time_to_error_batch64"]
  assert best.value == 0.853


def test_time_to_error_is_steps_times_step_and_link_by_hand():
  link = predict.HOST_LINKS["pcie3_x8"]
  row = index_rows(make_rows())["int8", "time_to_error_pcie3_x8"]
  # 10 steps of 30 ms and, each way, 10 transfers of 10 us and 1 MB at 7.877.
  each_ms = 0.1 + 1e6 / link.bandwidth * 1e3
  assert row.value == pytest.approx(10 * (30 + 2 * each_ms) / 1e3)
  assert row.unit == "s (emulated pcie3_x8)"
  # On a device nothing is emulated.
  cells = index_rows(make_rows(on_host=False))
  assert not [row for row in cells.values() if "emulated" in row.unit]
  assert cells["fp32", "host_to_device_ms"].value == PROFILE.ms["send"]
  assert cells["int8", "time_to_error"].value == pytest.approx(10 * 0.030)


def test_predictions_say_so_and_add_up():
  cells = index_rows(make_rows())
  for case in ("fp32", "int8", "awp"):
    terms = [
      cells[case, f"predicted_x86_{term}_ms"]
      for term in predict.BatchTimes._fields
    ]
    assert {row.unit for row in terms} == {"ms (predicted)"}
    batch = cells[case, "predicted_x86_batch_ms"]
    assert batch.value == pytest.approx(sum(row.value for row in terms))
  # By hand, of 439.06: 38.48 down, 17.13 up, 29.43 packed (1.6 times 5 bytes a
  # weight at 35.23 GB/s), 4.21 + 7.58 on the device, 29.43 unpacked, 162.23
  # computed, 54.39 updated.
  int8 = cells["int8", "predicted_x86_batch_ms"]
  assert int8.ratio == pytest.approx(342.87 / 439.06, abs=1e-3)
  # A fifth of what Bitpack takes for one byte.
  awp = cells["awp", "predicted_x86_norm_ms"]
  assert awp.value == pytest.approx(WEIGHTS / 35.23e6, rel=1e-3)
  assert cells["int8", "predicted_x86_norm_ms"].value == 0


def test_touched_bytes_match_a_count_by_hand():
  found = weights_rows.trained_metrics(RUNS, threshold=10.0)
  fp32, int8, awp = PROFILES
  quarter = weights_rows.count_touched_bytes(found["int8"], int8)
  assert quarter == predict.TouchedBytes(
    down=1, up=1, pack=8, unpack=5, grad_pack=9, grad_unpack=8
  )
  # Unpacking reads the reference too, and packing the error memory.
  with_delta = weights_rows.count_touched_bytes(
    found["int8"], int8._replace(case="int4_delta")
  )
  assert with_delta == quarter._replace(unpack=9, grad_pack=17)
  assert (
    weights_rows.count_touched_bytes(found["fp32"], fp32)
    == predict.TouchedBytes()
  )
  down = weights_rows.count_touched_bytes(found["awp"], awp)
  assert down == predict.TouchedBytes(down=1, pack=5, unpack=5, norm=1)


# The table of the page is made of its rows in test_tables.py.
def test_tables_show_ours_beside_the_papers():
  rows = make_rows()
  link_ms = 0.1 + 8e6 / predict.HOST_LINKS["pcie3_x8"].bandwidth * 1e3
  lines = weights_rows.profile_table(rows, "pcie3_x8").lines
  found = {line[0]: line for line in lines}
  assert {"153.93", "162.23"} <= set(found["paper_x86_fp32"])
  # The link is emulated; forward takes 4 ms and backward 5.
  assert {f"{link_ms:.2f}*", "9.00", "1.50 %"} <= set(found["fp32"])
  on_device = make_rows(on_host=False)
  lines = weights_rows.profile_table(on_device, "pcie3_x8").lines
  assert not [line for line in lines if line[0] == "fp32" and "*" in str(line)]
  lines = weights_rows.error_table(rows, "pcie3_x8").lines
  found = {line[0]: line for line in lines}
  assert "never" in found["awp"] and "+0.50" in found["int8"]
  assert "0.927 / 0.949 / 0.871" in found["paper_a2dtwp"]
  lines = weights_rows.prediction_table(rows, "x86").lines
  found = {line[0]: line for line in lines}
  assert "439.1 (1.000)" in found["fp32"] and "342.9 (0.781)" in found["int8"]
