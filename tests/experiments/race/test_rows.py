import pytest

from experiments.common.records import Measured, make_rows
from experiments.race import rows as race_rows
from experiments.race.rows import Point

CURVE = [Point(0, 0.0, 6.0), Point(8, 1.0, 4.0), Point(16, 2.0, 3.0)]


def run(curve=CURVE, **figures):
  done, minutes, loss = curve[-1]
  found = {"loss": loss, "minutes": minutes, "step_ms": 6e4 * minutes / done}
  found |= {"curve": race_rows.write_curve(curve)} | figures
  return {name: Measured(value, "") for name, value in found.items()}


def lines_of(runs):
  table = race_rows.summary_table(make_rows("race", runs))
  return table.header, {line[0]: line[1:] for line in table.lines}


def test_minutes_to_a_loss_are_interpolated():
  assert race_rows.minutes_to(CURVE, 5.0) == 0.5
  assert race_rows.minutes_to(CURVE, 3.5) == 1.5
  assert race_rows.minutes_to(CURVE, 2.9) is None
  assert race_rows.read_curve(race_rows.write_curve(CURVE)) == CURVE


def test_a_loss_that_rises_again_was_reached():
  curve = [*CURVE, Point(24, 3.0, 5.0)]
  assert race_rows.minutes_to(curve, 3.0) == 2.0


def test_targets_are_losses_of_the_baseline():
  late = [Point(0, 0.0, 6.0), Point(8, 0.1, 5.0), Point(16, 0.2, 4.0)]
  runs = {"1gbit/fp32/16/0": run(), "1gbit/int4_feedback/16/0": run(late)}
  header, lines = lines_of(runs)
  assert header[4:7] == ("to 6.000", "to 4.000", "to 3.000")
  assert lines["1gbit int4_feedback 16"][3:6] == ("0.00", "0.20", "-")
  # DDP is the baseline where it has run.
  header, _ = lines_of(runs | {"1gbit/torch_fp32/16/0": run(late)})
  assert header[4:7] == ("to 6.000", "to 5.000", "to 4.000")


def test_longer_runs_are_lines_of_their_own():
  longer = [*CURVE, Point(24, 3.0, 2.5)]
  runs = {"1gbit/fp32/24/0": run(longer), "1gbit/fp32/16/0": run()}
  header, lines = lines_of(runs)
  assert list(lines) == ["1gbit fp32 16", "1gbit fp32 24"]
  assert header[6] == "to 3.000", "the target is that of the shorter run"


def test_each_seed_has_its_own_target_and_all_must_reach_it():
  other = [Point(0, 0.0, 6.0), Point(8, 1.0, 4.0), Point(16, 3.0, 3.5)]
  runs = {"1gbit/fp32/16/0": run(), "1gbit/fp32/16/1": run(other)}
  late = [Point(0, 0.0, 6.0), Point(16, 4.0, 3.2)]
  runs |= {"1gbit/int8/16/0": run(), "1gbit/int8/16/1": run(late)}
  runs |= {"1gbit/sign_feedback/16/0": run(late)}
  runs |= {"1gbit/bf16/16/2": run()}
  header, lines = lines_of(runs)
  loss, minutes, _, *reached, _ = lines["1gbit fp32 16"]
  assert loss.startswith("3.250 ±") and minutes == reached[2] == "2.50"
  assert header[6] == "to 3.250"
  # One seed after 2 minutes, the other one where it passes 3.5.
  passed = 4 * (6 - 3.5) / (6 - 3.2)
  assert lines["1gbit int8 16"][5] == f"{(2 + passed) / 2:.2f}"
  assert lines["1gbit sign_feedback 16"][5] == "-"
  assert lines["1gbit bf16 16"][5] == "-", "the baseline has no such seed"


def test_the_prediction_is_one_host_and_the_exchange():
  sent = {"exchange_ms_predicted": 15e3, "interface_bytes": 2e6}
  runs = {
    "1gbit/none/16/0": run(),
    "1gbit/fp32/16/0": run(**sent),
    "1gbit/streaming_diloco/16/0": run(**sent),
    "1gbit/torch_fp32/16/0": run(**sent),
  }
  _, lines = lines_of(runs)
  # A step of one host takes 7.5 s, and hides a quarter of them.
  assert lines["1gbit fp32 16"][2] == "5.50"
  assert lines["1gbit streaming_diloco 16"][2] == "6.00"
  assert lines["1gbit torch_fp32 16"][2] == "", "no such host has run"
  assert lines["1gbit fp32 16"][-1] == "2.000"
  assert lines["1gbit none 16"][-1] == ""
  # One host of as many steps was measured at about the same time.
  slow = run([Point(0, 0.0, 6.0), Point(24, 6.0, 3.0)])
  runs |= {"1gbit/none/24/0": slow, "1gbit/fp32/24/0": run(**sent)}
  _, lines = lines_of(runs)
  assert lines["1gbit fp32 24"][2] == f"{24 * (0.75 * 15 + 15) / 60:.2f}"
  assert lines["1gbit fp32 16"][2] == "5.50"


def test_gains_are_those_of_the_longest_runs():
  longer = [*CURVE[:2], Point(24, 1.5, 3.0)]
  runs = {
    "1gbit/torch_fp32/16/0": run(),
    "1gbit/torch_fp32/24/0": run(longer),
    "1gbit/int8/24/0": run([Point(0, 0.0, 6.0), Point(24, 0.5, 3.0)]),
    "1gbit/int4_feedback/16/0": run([Point(0, 0.0, 6.0), Point(16, 0.1, 3.0)]),
    "1gbit/topk1_feedback/24/0": run([Point(0, 0.0, 6.0), Point(24, 2.0, 3.5)]),
    "100mbit/int8/24/0": run(longer),
  }
  table = race_rows.gain_table(make_rows("race", runs))
  assert table.header == ("case", "1gbit, min", "gain")
  assert table.lines == [
    ("`int8`", "0.50", "3.0"),
    ("`torch_fp32`", "1.50", "1.0"),
  ]
  alone = make_rows("race", {"1gbit/none/8/0": run()})
  assert not race_rows.gain_table(alone).lines


def test_a_case_takes_the_rate_of_its_best_trial():
  trials = {
    "trial/int8/16/0.001": run(),
    "trial/int8/16/0.003": run(loss=2.5),
    "trial/int8/16/0.009": run(loss=race_rows.DIVERGED),
  }
  rows = make_rows("race", trials | {"1gbit/int8/16/0": run()})
  assert race_rows.best_rates(rows) == {"int8": 0.003}
  table = race_rows.trial_table(rows)
  assert table.lines == [("int8", "3.000", "2.500", "diverged")]
  assert len(race_rows.summary_table(rows).lines) == 1


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_run_that_diverges_has_no_loss(seeds):
  runs = {f"1gbit/fp32/16/{i}": run() for i in range(seeds)}
  runs["1gbit/fp32/16/0"] = run(loss=race_rows.DIVERGED)
  assert lines_of(runs)[1]["1gbit fp32 16"][0] == "diverged"


def test_advice_is_beside_the_first_at_the_loss_of_its_link():
  runs = {
    "1gbit/none/16/0": run([*CURVE[:1], Point(16, 0.1, 3.0)], step_ms=7.5e3),
    "1gbit/fp32/16/0": run(),
    "1gbit/int8/16/0": run([*CURVE[:1], Point(16, 1.0, 3.0)], step_ms=4e3),
    "1gbit/int4_feedback/16/0": run([*CURVE[:1], Point(16, 0.8, 3.0)]),
    # The fastest step of all never has the loss.
    "1gbit/topk1_feedback/16/0": run([*CURVE[:1], Point(16, 0.1, 4.0)]),
    "1gbit/int4_feedback/8/0": run([*CURVE[:1], Point(8, 0.1, 3.0)]),
    "20mbit_rtt50ms/fp32/16/0": run(),
  }
  asked = []

  def advise_topk(*given):
    asked.append(given)
    return {"int8": 4.1, "topk1_feedback": 3.0, "bf16": 1.0}

  rows = make_rows("race", runs)
  slow, fast = (
    race_rows.advice_table(rows, advise).lines
    for advise in (advise_topk, lambda *_: {"int8": 4.1})
  )
  # What was not measured is not named.
  first = "int4_feedback", "0.80"
  assert slow == [("1gbit", "topk1_feedback", "3000", "375", "-", *first, "-")]
  assert fast == [("1gbit", "int8", "4100", "4000", "1.00", *first, "1.25")]
  assert asked == [("1gbit", 7.5)], "no host alone has run on the other link"
