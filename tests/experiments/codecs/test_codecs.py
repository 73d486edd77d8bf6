import pytest

from experiments.codecs import __main__ as codecs
from experiments.common import records

TINY = dict(elements=1 << 12, columns=64, leaves=(2, 4), repeats=2)


@pytest.fixture(scope="module")
def results():
  return codecs.run(**TINY)


def test_every_codec_has_every_number_it_should(results):
  found = {(r.metric, r.case) for r in results}
  assert found == {
    *(("encode_copies", case) for case in codecs.CASES),
    *(("update_ratio", case) for case in codecs.UPDATES),
    *(("vector_ratio", case) for case in codecs.UPDATES),
    *(("leaves2_ratio", case) for case in codecs.TREES),
    *(("leaves4_ratio", case) for case in codecs.TREES),
  }
  assert all(r.value > 0 and r.baseline > 0 for r in results)


def test_rows_hold_the_ratio_and_what_it_is_made_of(results, tmp_path):
  path = tmp_path / "rows.jsonl"
  codecs.write(results, path)
  rows = records.read_rows(path)
  assert len(rows) == len(results)
  for row, result in zip(rows, results, strict=True):
    assert (row.case, row.metric) == (result.case, result.metric)
    assert row.ratio == result.value
    assert row.value == pytest.approx(result.value * result.baseline)


def test_the_table_has_a_line_for_every_codec(results):
  table = codecs.make_table(results)
  assert list(table.columns[0].cells) == list(codecs.CASES)


def test_sizes_that_do_not_fit_are_named():
  with pytest.raises(ValueError, match="`elements` must be a multiple"):
    codecs.run(elements=100, columns=64, leaves=(4,), repeats=1)
