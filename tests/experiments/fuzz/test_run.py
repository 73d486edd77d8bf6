import os
import time

import pytest

from experiments.common import records
from experiments.fuzz.rounds import Defect, Round
from experiments.fuzz.run import (
  SUBJECTS,
  make_rows,
  run_subjects,
  summary_table,
)
from tests.experiments.jobs import run_module
from tests.paths import ROOT


def run_sound(seed):
  return Round(10)


def run_slowly(seed):
  time.sleep(0.02)
  return Round(1)


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

  tallies = run_subjects(
    {"odd": run_odd},
    600.0,
    rounds=9,
    processes=1,
    limit_s=3.0,
    report=report,
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


def test_rows_count_the_rounds_of_every_subject():
  def total(rows, case, metric):
    (row,) = [r for r in rows if (r.case, r.metric) == (case, metric)]
    return row.value

  tallies = run_subjects(
    {"a": run_sound, "b": run_sound}, 600.0, rounds=3, processes=1
  )
  rows = make_rows(tallies)
  for case in ("a", "b"):
    assert total(rows, case, "cases") == 10 * total(rows, case, "rounds") == 30
    assert total(rows, case, "defects") == 0
  assert [line[0] for line in summary_table(rows).lines] == ["a", "b"]


def test_time_is_shared_as_asked():
  tallies = run_subjects(
    {"rare": run_slowly, "often": run_slowly},
    0.6,
    shares={"often": 4.0},
    processes=1,
  )
  assert 0 < 2 * tallies["rare"].rounds < tallies["often"].rounds


def test_the_command_prints_counts_and_writes_rows(tmp_path):
  path = tmp_path / "fuzz.jsonl"
  done = run_module(
    "fuzz", "--subjects=files", "--minutes=0", "--processes=1", f"--json={path}"
  )
  assert done.returncode == 0, done.stderr
  counts = {row.metric: row.value for row in records.read_rows(path)}
  assert counts["rounds"] == 1 and counts["cases"] > 100
  assert counts["defects"] == 0
  assert f"{counts['cases']}" in done.stdout


def test_the_page_names_every_subject():
  page = (ROOT / "docs" / "fuzz.md").read_text()
  assert [name for name in SUBJECTS if f"| {name} |" not in page] == []


def test_the_command_refuses_a_misspelt_subject_in_one_line():
  done = run_module("fuzz", "--round=codex:1")
  assert done.returncode == 1
  assert "codex" in done.stderr and "Traceback" not in done.stderr
