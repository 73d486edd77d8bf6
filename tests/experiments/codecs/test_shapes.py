"""Tests of the shape timings: the list, ratios, rows and table."""

import math

import pytest

from experiments.codecs import shape_cases as cases, shape_run as run
from experiments.codecs.shape_run import is_current, make_rows
from experiments.common import records, timing
from tests.experiments import jobs

TINY = {
  "odd_2": cases.Awkward(((33, 31), (7,), ()), workers=2),
  "odd": cases.Awkward(((33, 31), (7,), ()), workers=3),
}


@pytest.fixture(scope="module")
def results():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cases, "AWKWARD", TINY)
    patch.setattr(cases, "_COLUMNS", 64)
    patch.setattr(cases, "_ROWS_STEP", 16)
    codecs = [cases.PLAIN, "sign_feedback"]
    return list(run.measure_shapes(list(TINY), codecs, run.METRICS, 2))


def test_twenty_shapes_are_listed_beside_matrices_of_as_many_values():
  assert len(cases.AWKWARD) == 20
  for awkward in cases.AWKWARD.values():
    values = cases.count_values(awkward.shapes)
    friendly = cases.find_friendly(values)
    assert friendly.workers == cases.FRIENDLY_WORKERS
    assert 0.9 < values / cases.count_values(friendly.shapes) < 1.1
    ((rows, columns),) = friendly.shapes
    assert rows % 128 == 0 and math.log2(columns).is_integer()


def test_a_tree_is_encoded_once_and_exchanged_by_each_number_of_workers(
  results,
):
  found = [(r.metric, r.case) for r in results]
  assert found == [
    ("encode", "odd_2/sign_feedback"),
    ("update", "odd_2/identity"),
    ("update", "odd_2/sign_feedback"),
    ("exchange", "odd_2/identity"),
    ("exchange", "odd/identity"),
    ("exchange", "odd_2/sign_feedback"),
    ("exchange", "odd/sign_feedback"),
  ]
  assert all(r.value > 0 and r.baseline > 0 for r in results)


def test_joined_arrays_are_timed_where_there_are_several_to_exchange():
  several = [n for n, a in cases.AWKWARD.items() if len(a.shapes) > 1]
  work = list(
    run._list_work(list(cases.AWKWARD), ["int8_buckets"], run.METRICS)
  )
  assert {metric for metric, *_ in work} == {"exchange"}
  assert sorted(name for *_, name in work) == sorted(several)


def test_what_is_done_is_not_measured_again(results):
  done = [(r.case, r.metric) for r in results]
  names = [r.case.split("/")[0] for r in results]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cases, "AWKWARD", TINY)
    patch.setattr(timing, "measure_times", None)
    codecs = [cases.PLAIN, "sign_feedback"]
    again = run.measure_shapes(names, codecs, run.METRICS, 2, done)
    assert list(again) == []


def test_rows_hold_the_time_its_baseline_and_their_ratio(results, tmp_path):
  path = tmp_path / "rows.jsonl"
  records.write_rows(path, make_rows(results))
  rows = records.read_rows(path)
  for row, result in zip(rows, results, strict=True):
    assert (row.experiment, row.unit) == ("codecs_shapes", "ns")
    assert (row.case, row.metric) == (result.case, f"{result.metric}_ns")
    assert row.ratio == result.value
    assert row.value / row.baseline == pytest.approx(result.value)
  # Rows of other sources are not current.
  assert is_current(row)
  assert not is_current(row._replace(jax="0.1"))
  machine = records.drop_sources(row.machine)
  assert machine != row.machine
  assert not is_current(row._replace(machine=f"{machine}; commit 0123456"))


def test_ratios_are_per_value_and_worker():
  one, eight = (cases.Awkward(((64,),), workers=w) for w in (1, 8))
  work = [run._count_work(m, w) for w in (one, eight) for m in run.METRICS]
  assert work == [64, 64, 64, 64, 64, 512]


@pytest.mark.slow
def test_the_command_goes_on_with_the_rows_that_are_there(tmp_path):
  path = tmp_path / "rows.jsonl"

  def run_command(*flags):
    usual = ["--only_shapes=scalar_and_empty", "--only_metrics=update"]
    usual += ["--repeats=1", f"--json={path}"]
    done = jobs.run_module("codecs.shapes", *usual, *flags)
    assert done.returncode == 0, done.stderr
    return path.read_text().splitlines()

  first = run_command("--only_codecs=int4")
  more = run_command("--only_codecs=int4,identity")
  assert len(first) == 1 and more[:1] == first and len(more) == 2
