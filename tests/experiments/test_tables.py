import absl.app
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


@pytest.mark.parametrize(
  ("paths", "message"),
  [
    ([], "Name at least one file of rows, got none"),
    (["no_such_file"], "No table of no_such_file: `rows` must hold at least"),
    ([str(ROOT / "README.md")], "No table of .*README.md: "),
  ],
)
def test_what_is_no_file_of_rows_is_named(paths, message):
  with pytest.raises(absl.app.UsageError, match=message):
    tables.main(["tables", *paths])
