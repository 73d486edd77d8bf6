"""Tests of the figures on the pages."""

import fnmatch

import absl.app
import pytest

from experiments import figures
from tests.paths import ROOT

RESULTS = ROOT / "docs" / "results"
FIGURES = sorted(path.stem for path in RESULTS.glob("*.png"))
PAGES = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]


def test_every_figure_is_drawn_from_rows_and_is_on_a_page():
  text = "".join(path.read_text() for path in PAGES)
  assert FIGURES
  for name in FIGURES:
    assert (RESULTS / f"{name}.jsonl").exists(), name
    assert any(fnmatch.fnmatch(name, known) for known in figures.FIGURES), name
    assert f"results/{name}.png)" in text, f"{name}.png is on no page"


def test_rows_give_figures_at_double_resolution(tmp_path):
  rows = tmp_path / "train_digits.jsonl"
  rows.write_bytes((RESULTS / rows.name).read_bytes())
  (drawn,) = figures.draw_figures([str(rows), str(RESULTS / "codecs.jsonl")])
  header = drawn.read_bytes()[:24]
  assert header.startswith(b"\x89PNG")
  assert int.from_bytes(header[16:20]) == 1400  # Pixels, of 7 inches.


def test_no_file_at_all_prints_the_usage():
  with pytest.raises(absl.app.UsageError, match="Name at least one file"):
    figures.main(["figures"])
