"""Tests of the history of benchmarks."""

import pytest

from experiments import history
from experiments.common.console import JobError
from experiments.common.tables import Table


def test_rows_are_ratios_within_a_turn_and_commits_are_columns():
  times = {"fp32": [1.0, 2.0, 4.0], "int8": [3.0, 4.0, 16.0]}
  old = history.make_rows("aaa", [("compile_ratio", "fp32", times)])
  (row,) = old
  assert (row.case, row.value) == ("int8", 3.0)
  once = {"fp32": [2.0], "int8": [1.0], "sign": [0.5]}
  new = history.make_rows("bbb", [("compile_ratio", "fp32", once)])
  assert new[0].noise is None
  table = history.summary_table([*old, *new])
  assert isinstance(table, Table)
  assert [name.split()[-1] for name in table.header[2:]] == ["aaa", "bbb"]
  assert [list(line[1:]) for line in table.lines] == [
    ["int8", "3.00 ± 1.00", "0.50"],
    ["sign", "", "0.25"],
  ]


def test_a_commit_that_git_does_not_know_is_asked_for(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(JobError, match="`--commit` must be given"):
    history._find_commit()
