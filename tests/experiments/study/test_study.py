import math

import pytest

from experiments.common import records
from experiments.study import rows as study_rows
from experiments.study.run import choose_rates, run_experiment
from experiments.study.trainer import StudyRun, link_seconds, typical_ms
from experiments.tables import render_markdown
from jaxmotion import perfmodel
from jaxmotion.wire import Ledger, Move

SMALL = {
  "lengths": (4, 8),
  "trial_steps": 2,
  "fine": 1.0,  # Each outer rate is a program of its own.
}


def test_a_stopped_study_goes_on_and_its_rows_make_a_table(
  tmp_path, tiny, capsys
):
  config = tiny("study_decoder", **SMALL, algorithms=("fp32",))
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  run_experiment(config, json=str(json), workdir=str(tmp_path / "jobs"))
  first = {row.metric: row for row in records.read_rows(json)}
  assert capsys.readouterr().err == ""
  # Budgets of the baseline buy what it has itself.
  own = first["bits_per_byte_4"].value
  assert first["bits_per_byte_equal_bytes_4"].value == pytest.approx(own)
  assert first["bits_per_byte_equal_time_10mbit_4"].value == pytest.approx(own)
  assert first["trials"].value.count(":") == 3

  config.algorithms = ("fp32", "streaming_diloco")
  rows = run_experiment(
    config, json=str(json), plot=str(plot), workdir=str(tmp_path / "jobs")
  )
  # Trials, and a run of each length.
  done = f"{tmp_path / 'jobs'} has {3 + 2} finished runs; the others follow.\n"
  assert capsys.readouterr().err == done
  again = {row.metric: row for row in rows if row.case == "fp32"}
  assert again["step_ms"] == first["step_ms"], "it was trained again"
  local = {row.metric: row for row in rows if row.case == "streaming_diloco"}
  # Eight steps have one exchange: quiet steps send nothing.
  assert 0 < local["wire_bytes"].ratio < 1 / 40
  assert plot.read_bytes().startswith(b"\x89PNG")
  table = render_markdown(records.read_rows(json))
  assert table.count("\n") == 3 and "| streaming_diloco |" in table


@pytest.mark.parametrize(
  ("name", "peak", "chosen", "count"),
  [
    # Between the base rate and three times it, then beyond both ends.
    ("fp32", 1.8e-3, (1e-3 * 3**0.5, None), 5),
    ("fp32", 9.0, (1e-3 * 3**2.5, None), 7),
    ("fp32", 1e-9, (1e-3 / 3**2.5, None), 7),
    ("diloco_int4", 0.7, (1e-3, 0.7), 5),
    ("diloco_int4", 1e-9, (1e-3, 0.7 / 3**1.5), 7),
  ],
)
@pytest.mark.parametrize("higher", [True, False])
def test_trials_go_on_while_the_best_is_at_an_end(
  load_config, name, peak, chosen, count, higher
):
  config, tried = load_config("study_decoder"), []
  config.further = 2

  def run(trial):
    tried.append((trial.rate, trial.outer_rate))
    knob = trial.rate if trial.outer_rate is None else trial.outer_rate
    # Inner rates of local updates are best at their base.
    lost = abs(math.log(knob / peak)) + abs(math.log(trial.rate / 1e-3)) * (
      trial.outer_rate is not None
    )
    score = 50 - lost if higher else 50 + lost
    return StudyRun(trial, score, 1.0, 1.0, [1.0] * 3, 1.0)

  best = choose_rates(config, name, run, higher=higher)
  assert (best.trial.rate, best.trial.outer_rate) == pytest.approx(chosen)
  assert len(set(tried)) == count


def test_trials_that_diverge_are_the_worst(load_config):
  def run(trial):
    score = None if trial.rate > 1e-3 else 10.0
    return StudyRun(trial, score, 1.0, 1.0, [1.0] * 3, 1.0)

  config = load_config("study_decoder")
  assert choose_rates(config, "fp32", run, higher=False).score == 10.0


def test_scores_are_linear_in_the_logarithm_of_the_cost():
  curve = [(10.0, 90.0), (1000.0, 98.0)]
  assert study_rows.score_at(curve, 10.0) == 90.0
  assert study_rows.score_at(curve, 100.0) == pytest.approx(94.0)
  assert study_rows.score_at(curve, 5000.0) == 98.0
  assert study_rows.score_at(curve, 9.6) == 90.0
  assert study_rows.score_at(curve, 9.0) is None
  assert study_rows.score_at([], 9.0) is None


def test_steps_that_exchange_count_in_the_time_of_a_step():
  quiet_and_due = ([1.0] * 7 + [9.0]) * 20
  slow_minute = [50.0] * 10
  assert typical_ms(quiet_and_due + slow_minute) == pytest.approx(2.0)
  assert typical_ms([3.0, 5.0]) == 4.0


def test_sums_of_one_dtype_wait_for_one_message():
  link = perfmodel.Link(latency_s=0.01, rate=perfmodel.gbit_per_s(0.008))
  move = Move("all_reduce", ("data",), 2, "float32", 1000, 1)
  sums = Ledger((move, move))
  # Two messages of 10 ms, and 2000 bytes at 1 MB/s.
  assert link_seconds(sums, link) == pytest.approx(0.02 + 0.002)
  assert link_seconds(sums, link, rounds=2) == pytest.approx(0.04 + 0.002)
  gathers = Ledger((move._replace(op="all_gather"),))
  once = link_seconds(gathers, link)
  assert link_seconds(gathers, link, rounds=2) == once
  # Parts at different steps wait for messages of their own, of one hop here.
  assert link_seconds(gathers, link, fragments=4) == pytest.approx(once + 0.03)
