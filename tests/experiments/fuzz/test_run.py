import os
import re
import time

import pytest
from absl.testing import flagsaver

from experiments.common import records
from experiments.fuzz import __main__ as fuzz_main, run
from experiments.fuzz.rounds import Defect, Round
from tests.paths import ROOT


def run_slowly(seed):
  time.sleep(0.02)
  return Round(10)


def run_odd(seed):
  """Breaks a law at odd seeds, in the four ways in which a round can end."""
  if seed == 1:
    return Round(1, (Defect("even", f"seed {seed}", "it is odd"),))
  if seed == 3:
    raise IndexError("out of range")
  if seed == 5:
    os._exit(139)
  if seed == 7:
    time.sleep(60)
  return Round(1)


@pytest.mark.slow
def test_every_kind_of_defect_is_found_and_rounds_go_on():
  seen = []

  def report(tallies, defect):
    seen.append((tallies["odd"].rounds, defect))

  tallies = run.run_subjects(
    {"odd": run_odd}, 600.0, rounds=9, processes=1, limit_s=3.0, report=report
  )
  tally = tallies["odd"]
  assert (tally.rounds, tally.cases) == (9, 6)
  laws = {defect.law: defect for defect in tally.defects}
  assert len(tally.defects) == len(laws) == 4
  assert laws["even"].case == "seed 1"
  error = laws["a case raises only documented errors"]
  assert error.case == "--round=odd:3" and "IndexError" in error.detail
  assert "exit code 139" in laws["a case never ends the process"].detail
  assert laws["a round ends in time"].case == "--round=odd:7"
  assert [defect for _, defect in seen if defect] == tally.defects


def test_the_command_shares_the_time_prints_counts_and_writes_rows(
  tmp_path, monkeypatch, capsys
):
  subjects = {"rare": run_slowly, "often": run_slowly}
  monkeypatch.setattr(run, "SUBJECTS", subjects)
  monkeypatch.setattr(run, "SHARES", {"often": 4.0})
  path = tmp_path / "fuzz.jsonl"
  with (
    flagsaver.flagsaver(subjects=list(subjects), minutes=0.6 / 60),
    flagsaver.flagsaver(processes=1, seed=0, json=str(path)),
    pytest.raises(SystemExit) as ended,
  ):
    fuzz_main.main()
  assert not ended.value.code
  rows = records.read_rows(path)
  found = {(row.case, row.metric): row.value for row in rows}
  assert 0 < 2 * found["rare", "rounds"] < found["often", "rounds"]
  said = capsys.readouterr().out
  for case in subjects:
    assert found[case, "cases"] == 10 * found[case, "rounds"]
    assert found[case, "defects"] == 0 < found[case, "seconds"]
    assert f"{found[case, 'cases']}" in said


def test_the_command_runs_one_round(capsys):
  with (
    flagsaver.flagsaver(round=run.parse_round("files:1")),
    pytest.raises(SystemExit) as ended,
  ):
    fuzz_main.main()
  assert not ended.value.code
  assert re.search(r"1\d\d cases, 0 defects", capsys.readouterr().out)
  for text, message in {
    "codex:1": "SUBJECT must be one of .*did you mean 'codecs'",
    "codecs": "must be SUBJECT:SEED, such as codecs:17, got 'codecs'",
  }.items():
    with pytest.raises(ValueError, match=message):
      run.parse_round(text)


def test_the_page_names_every_subject():
  page = (ROOT / "docs" / "fuzz.md").read_text()
  assert [name for name in run.SUBJECTS if f"| {name} |" not in page] == []
