import pytest

from experiments.common import records
from experiments.study import rows as study_rows
from experiments.study.run import run_experiment
from experiments.study.trainer import link_seconds
from experiments.tables import render_markdown
from jaxmotion import perfmodel
from jaxmotion.wire import Ledger, Move
from tests.experiments.jobs import save_images

SMALL = {
  "workers": 2,
  "batch_size": 8,
  "channels": (4, 4),
  "hidden": 8,
  "seeds": (0,),
  "lengths": (4, 8),
  "trial_steps": 2,
}


def test_a_stopped_study_goes_on_and_its_rows_make_a_table(
  tmp_path, load_config
):
  config = load_config("study_digits")
  images = save_images(tmp_path / "images.npz")
  config.update({**SMALL, **images, "algorithms": ("fp32",)})
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  run_experiment(config, json=str(json), workdir=str(tmp_path / "jobs"))
  first = {row.metric: row for row in records.read_rows(json)}
  # Budgets of the baseline buy what it has itself.
  own = first["test_accuracy_4"].value
  assert first["test_accuracy_equal_bytes_4"].value == pytest.approx(own)
  assert first["test_accuracy_equal_time_10mbit_4"].value == pytest.approx(own)
  assert 5 <= first["trials"].value.count(":") <= 7

  config.algorithms = ("fp32", "diloco_int4")
  rows = run_experiment(
    config, json=str(json), plot=str(plot), workdir=str(tmp_path / "jobs")
  )
  again = {row.metric: row for row in rows if row.case == "fp32"}
  assert again["step_ms"] == first["step_ms"], "it was trained again"
  local = {row.metric: row for row in rows if row.case == "diloco_int4"}
  # Eight steps have one exchange: quiet steps send nothing.
  assert 0 < local["wire_bytes"].ratio < 1 / 8
  outer = {t.split(":")[0] for t in local["trials"].value.split(", ")}
  assert {"0.002/0.7", "0.006/0.7"} <= outer and 5 <= len(outer) <= 7
  assert plot.read_bytes().startswith(b"\x89PNG")
  table = render_markdown(records.read_rows(json))
  assert table.count("\n") == 3 and "| diloco_int4 |" in table


def test_an_unknown_algorithm_is_refused_before_any_work(load_config):
  config = load_config("study_digits")
  config.algorithms = ("fp32", "dilocoo")
  with pytest.raises(ValueError, match=r"`config.algorithms` .* got 'dilocoo'"):
    run_experiment(config)


def test_scores_are_linear_in_the_logarithm_of_the_cost():
  curve = [(10.0, 90.0), (1000.0, 98.0)]
  assert study_rows.score_at(curve, 10.0) == 90.0
  assert study_rows.score_at(curve, 100.0) == pytest.approx(94.0)
  assert study_rows.score_at(curve, 5000.0) == 98.0
  assert study_rows.score_at(curve, 9.0) is None
  assert study_rows.score_at([], 9.0) is None


def test_sums_of_one_dtype_wait_for_one_message():
  link = perfmodel.Link(latency_s=0.01, rate=perfmodel.gbit_per_s(0.008))
  move = Move("all_reduce", ("data",), 2, "float32", 1000, 1)
  sums = Ledger((move, move))
  # Two messages of 10 ms, and 2000 bytes at 1 MB/s.
  assert link_seconds(sums, link) == pytest.approx(0.02 + 0.002)
  assert link_seconds(sums, link, rounds=2) == pytest.approx(0.04 + 0.002)
