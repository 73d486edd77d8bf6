"""Tests of the codec timings: every case measured, rows and table."""

import pytest

from experiments.codecs import run
from experiments.codecs.run import make_rows
from experiments.codecs.tables import summary_table
from experiments.common import records
from experiments.common.console import JobError

SOME = ("int8", "topk1")  # Others are timed alike.
TINY = dict(elements=1 << 12, columns=64, leaves=(2,), repeats=2)


@pytest.fixture(scope="module")
def results():
  names = *SOME, "int8_feedback"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(run, "SOME", SOME)
    patch.setattr(run, "CODECS", {name: run.CODECS[name] for name in names})
    return run.measure_codecs(**TINY)


def test_every_codec_has_every_number_it_should(results):
  metrics = "update_ratio", "vector_ratio", "leaves2_ratio"
  found = {(r.metric, r.case) for r in results}
  assert found == {
    *(("encode_copies", case) for case in (*SOME, "int8_feedback")),
    *((metric, case) for metric in metrics for case in SOME),
  }
  assert all(r.value > 0 and r.baseline > 0 for r in results)


def test_rows_hold_the_ratio_and_the_milliseconds_behind_it(results, tmp_path):
  path = tmp_path / "rows.jsonl"
  records.write_rows(path, make_rows(results))
  rows = records.read_rows(path)
  assert {row.experiment for row in rows} == {"codecs"}
  for ratio, time, result in zip(rows[::2], rows[1::2], results, strict=True):
    assert (ratio.case, ratio.metric) == (result.case, result.metric)
    assert (ratio.value, ratio.noise) == (result.value, result.noise)
    assert (time.unit, time.baseline) == ("ms", result.baseline)
    assert time.value == pytest.approx(result.value * result.baseline)
  units = {row.metric: row.unit for row in rows}
  assert units["encode_copies"] == "copies"
  assert units["encode_ms"] == units["leaves2_ms"] == "ms"
  assert units["update_ratio"] == "x"
  table = summary_table(rows, show_noise=True)
  assert " ± " in table.lines[0][1]


def test_sizes_that_do_not_fit_are_named():
  with pytest.raises(JobError, match="`elements` must be a multiple"):
    run.measure_codecs(elements=100, columns=64, leaves=(4,), repeats=1)
