import pytest

from experiments import tables
from experiments.common import records
from tests.paths import ROOT


@pytest.mark.parametrize(
  ("name", "page"),
  [
    ("train_digits", "README.md"),
    ("train_digits", "docs/train.md"),
    ("codecs", "docs/codecs.md"),
    ("hosts_2_1gbit", "docs/hosts.md"),
    ("hosts_2_100mbit", "docs/hosts.md"),
    ("weights_vgg", "docs/weights.md"),
    ("activations", "docs/activations.md"),
    ("residuals", "docs/residuals.md"),
    ("residuals_accuracy", "docs/residuals.md"),
  ],
)
def test_the_tables_of_pages_are_made_of_the_rows(name, page):
  rows = records.read_rows(ROOT / "docs" / "results" / f"{name}.jsonl")
  assert tables.render_markdown(rows) in (ROOT / page).read_text()
