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
    ("codecs_shapes", "docs/codecs.md"),
    ("history", "docs/benchmarks.md"),
    ("hosts_2_1gbit", "docs/hosts.md"),
    ("hosts_2_100mbit", "docs/hosts.md"),
    ("weights_vgg", "docs/weights.md"),
    ("activations", "docs/activations.md"),
    ("hetero", "docs/hetero.md"),
    ("residuals", "docs/residuals_measured.md"),
    ("study_digits", "docs/study.md"),
    ("study_bytes_lm", "docs/study.md"),
    ("study_bytes_lm_more", "docs/study.md"),
    ("study_bytes_lm_demo", "docs/study.md"),
    ("residuals_accuracy", "docs/residuals_measured.md"),
    ("residuals_compare", "docs/residuals_measured.md"),
    ("planner_links", "docs/howto/will_it_pay.md"),
    ("planner_memory", "docs/fit_memory.md"),
  ],
)
def test_the_tables_of_pages_are_made_of_the_rows(name, page):
  rows = records.read_rows(ROOT / "docs" / "results" / f"{name}.jsonl")
  assert tables.render_markdown(rows) in (ROOT / page).read_text()


def test_the_memory_that_is_saved_is_that_of_the_rows():
  path = ROOT / "docs" / "results" / "residuals_compare.jsonl"
  values = {(r.case, r.metric): r.value for r in records.read_rows(path)}
  cases = (
    *("plain", "jax_block_nothing", "ours", "ours_budget_0.5"),
    *("ours_budget_0", "ours_8bits", "ours_4bits"),
  )
  page = (ROOT / "docs" / "howto" / "out_of_memory.md").read_text()
  table = page.split("| step | temporaries, MiB | step, ms |\n")[1]
  lines = table.split("\n\n")[0].splitlines()[1:]
  for case, line in zip(cases, lines, strict=True):
    mib = float(values[f"gpt/{case}", "temp_bytes"]) / 2**20
    ms = float(values[f"gpt/{case}", "step_ms_predicted"])
    assert line.endswith(f" | {mib:,.0f} | {ms:.1f} |")


def test_the_bytes_of_each_number_of_hosts_are_those_of_the_rows():
  folder = ROOT / "docs" / "results"
  values = {
    (row.case, hosts, row.metric): float(row.value)
    for hosts in (2, 3, 4, 8)
    for row in records.read_rows(folder / f"hosts_{hosts}_bytes.jsonl")
  }
  lines = []
  for case in dict.fromkeys(case for case, _, _ in values):
    cells = [case]
    for hosts in (2, 3, 4, 8):
      for kind in ("predicted", "counted"):
        found = values[case, hosts, f"wire_bytes_{kind}"]
        cells.append(f"{found / 1e3:,.1f}")
    lines.append(f"| {' | '.join(cells)} |\n")
  page = (ROOT / "docs" / "hosts.md").read_text()
  assert "".join(lines) in page


def test_no_file_at_all_prints_the_usage():
  with pytest.raises(absl.app.UsageError, match="Name at least one file"):
    tables.main(["tables"])


@pytest.mark.parametrize(
  ("text", "match"),
  [
    (None, r"bad.jsonl' must exist"),
    ("", r"at least one row, got none"),
    ('{"experiment": "train_di', r"bad.jsonl' line 1 must be a JSON object"),
  ],
)
def test_files_without_rows_give_one_line(tmp_path, text, match):
  path = tmp_path / "bad.jsonl"
  if text is not None:
    path.write_text(text)
  with pytest.raises(SystemExit, match=match) as caught:
    tables.main(["tables", str(path)])
  assert "bad.jsonl" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("experiment", sorted([*tables._SUMMARIES, "unknown"]))
def test_rows_of_another_command_give_one_line(tmp_path, experiment):
  row = records.Row(experiment, "a", "b", "c", "d", None, None, None, "e", "f")
  path = tmp_path / "bad.jsonl"
  records.write_rows(path, [row])
  try:
    tables.main(["tables", str(path)])
  except SystemExit as error:
    assert "bad.jsonl" in str(error) and "\n" not in str(error)
