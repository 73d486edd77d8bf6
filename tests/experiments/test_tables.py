import pytest

from experiments import tables
from experiments.common import records
from tests.paths import ROOT


@pytest.mark.parametrize(
  "name",
  ["train_digits", "codecs", "hosts_2_1gbit", "hosts_2_100mbit", "weights_vgg"],
)
def test_the_readmes_tables_are_made_of_the_rows(name):
  rows = records.read_rows(ROOT / "docs" / "results" / f"{name}.jsonl")
  assert tables.render_markdown(rows) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
  ("name", "page"),
  [
    ("activations", "activations"),
    ("residuals", "residuals"),
    ("residuals_accuracy", "residuals"),
  ],
)
def test_the_tables_of_pages_are_made_of_the_rows(name, page):
  rows = records.read_rows(ROOT / "docs" / "results" / f"{name}.jsonl")
  assert (
    tables.render_markdown(rows) in (ROOT / "docs" / f"{page}.md").read_text()
  )
