"""Jobs under faults: the short form of `experiments.fuzz.faults`."""

import pytest

from experiments.common import checkpoint, records, workdir
from experiments.fuzz import fault_files, fault_kills, fault_soak
from experiments.fuzz.fault_jobs import Outcome
from experiments.fuzz.run import run_guarded
from tests.experiments.jobs import run_module

GOOD = Outcome([0.5, 0.25], "digest", [])


def test_no_broken_file_is_read():
  found = fault_files.run_round(0)
  assert found.cases > 0
  assert found.defects == ()


@pytest.mark.parametrize(
  ("module", "name", "blind"),
  [
    (checkpoint, "_is_same", lambda found, wanted: True),
    (workdir, "_digest", lambda line: ""),
  ],
)
def test_files_without_a_checksum_are_found(monkeypatch, module, name, blind):
  monkeypatch.setattr(module, name, blind)
  rounds = (run_guarded(fault_files.run_round, "faults", i) for i in range(3))
  assert any(found.defects for found in rounds)


def test_a_difference_is_named():
  differ = lambda **f: fault_kills._differ(GOOD, GOOD._replace(**f))
  assert differ() == "nothing differs"
  found = differ(losses=[0.5, 0.125])
  assert found == "loss 0.125 instead of 0.25 at step 1"
  assert differ(digest="other") == "digest: other, not digest"


def test_growth_is_measured_between_quarters():
  steady = [fault_soak.Sample(100, 5, 7, 3)] * 8
  assert fault_soak._measure_growth(steady) == (0, 0, 0, 0)
  leaking = [sample._replace(threads=i) for i, sample in enumerate(steady)]
  assert fault_soak._measure_growth(leaking).threads == 4


@pytest.mark.slow
def test_killed_jobs_go_on_bit_for_bit_or_with_other_workers(tmp_path):
  path = tmp_path / "rows.jsonl"
  flags = ["--kills=1", "--processes=1,2", "--resizes=1", "--steps=20"]
  done = run_module("fuzz.faults", *flags, f"--json={path}")
  assert done.returncode == 0, done.stdout + done.stderr
  found = {(row.case, row.metric): row.value for row in records.read_rows(path)}
  for case, metric in (
    ("kill_1_processes", "resumed_bit_exact"),
    ("kill_2_processes", "resumed_bit_exact"),
    ("kill_and_resize", "continued"),
  ):
    assert found[case, "signals"] == found[case, metric] == 1
    assert found[case, "defects"] == 0
