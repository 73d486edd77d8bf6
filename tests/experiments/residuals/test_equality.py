import pytest
from absl import flags
from absl.testing import flagsaver

from experiments.common import records
from experiments.residuals import equality
from experiments.residuals.networks import NetworkSpec


def run_command(path, **changes):
  flags.FLAGS.mark_as_parsed()
  options = {
    "networks": [
      NetworkSpec("tiny", 2, {"width": 0.5, "stride": 1, "repeats": 1})
    ],
    "modes": ["cut", "cut_int8"],
    "json": str(path),
  }
  with flagsaver.flagsaver(**(options | changes)):
    equality.main()
  return records.read_rows(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  path = tmp_path_factory.mktemp("equality") / "rows.jsonl"
  run_command(path)
  return path


@pytest.fixture(scope="module")
def rows(path):
  return {
    (r.case.rpartition("/")[2], r.metric): r for r in records.read_rows(path)
  }


def test_the_lossless_cut_is_as_near_to_float64_as_plain_training(rows):
  assert 0 < rows["plain", "gradient_error"].value < 1e-3
  assert rows["cut", "gradient_error"].ratio == pytest.approx(1, abs=0.1)
  assert rows["cut", "gradient_from_plain"].value < 1e-5
  assert rows["cut", "gradient_error_float64"].value < 1e-12
  assert 1e-4 < rows["cut_int8", "gradient_error"].value < 0.1
  assert rows["cut_int8", "values_equal"].value < 1


def test_every_mode_has_the_rows_that_it_can_have(rows):
  metrics = {
    mode: {metric for case, metric in rows if case == mode}
    for mode in ("plain", "cut", "cut_int8")
  }
  assert metrics["plain"] == {"gradient_error"}
  lossy = {"gradient_error", "gradient_from_plain", "values_equal"}
  assert metrics["cut_int8"] == lossy
  assert metrics["cut"] == lossy | {"gradient_error_float64"}
  assert {r.experiment for r in rows.values()} == {"residuals_equality"}


def test_networks_that_hold_still_are_not_run_again(path, tmp_path):
  found, copy = records.read_rows(path), tmp_path / "rows.jsonl"
  other = found[0]._replace(case="other_batch2/plain", machine="another")
  marked = [r._replace(value=0.5) for r in found]
  records.write_rows(copy, [other, *marked])
  assert run_command(copy) == [other, *marked]
  fresh = run_command(copy, fresh=True)
  assert fresh[0] == other
  assert [(r.case, r.metric) for r in fresh[1:]] == [
    (r.case, r.metric) for r in found
  ]
  assert all(r.value != 0.5 for r in fresh[1:])
