import fnmatch
import re

import absl.app
import pytest

from experiments import figures, history, tables
from experiments.common import records
from experiments.common.console import JobError
from experiments.common.tables import Table
from tests.paths import ROOT

PAGES_OF_ROWS = {
  "README.md": ["train_digits"],
  "docs/train.md": ["train_digits"],
  "docs/codecs.md": ["codecs", "codecs_shapes"],
  "docs/benchmarks.md": ["history"],
  "docs/hosts.md": ["hosts_2_1gbit", "hosts_2_100mbit"],
  "docs/weights.md": ["weights_vgg"],
  "docs/activations.md": ["activations"],
  "docs/hetero.md": ["hetero"],
  "docs/residuals_measured.md": [
    *("residuals", "residuals_accuracy", "residuals_compare")
  ],
  "docs/study.md": [
    *("study_digits", "study_bytes_lm"),
    *("study_bytes_lm_more", "study_bytes_lm_demo"),
  ],
  "docs/howto/will_it_pay.md": ["planner_links"],
  "docs/fit_memory.md": ["planner_memory"],
}


@pytest.mark.parametrize("page", PAGES_OF_ROWS)
def test_the_tables_of_pages_are_made_of_the_rows(page):
  text = (ROOT / page).read_text()
  for name in PAGES_OF_ROWS[page]:
    rows = records.read_rows(ROOT / "docs" / "results" / f"{name}.jsonl")
    assert tables.render_markdown(rows) in text, name


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


@pytest.mark.parametrize("command", [tables.main, figures.main])
def test_no_file_at_all_prints_the_usage(command):
  with pytest.raises(absl.app.UsageError, match="Name at least one file"):
    command(["tables"])


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


FOLDER, RESULTS = ROOT / "experiments", ROOT / "docs" / "results"
LINES = [
  [cell.strip() for cell in line.strip("| ").split(" | ")]
  for line in (FOLDER / "README.md").read_text().splitlines()
  if line.startswith("| `")
]
COMMANDS = [re.match(r"`([\w.]+)`", line[0])[1] for line in LINES]


def runners():
  """Names of all modules that can be started as commands."""
  for path in FOLDER.rglob("*.py"):
    text = path.read_text()
    if "shared_flags.run_main(main)" in text:
      parts = path.relative_to(FOLDER).with_suffix("").parts
      yield ".".join(part for part in parts if part != "__main__")


def test_every_runner_is_in_the_table_and_every_command_exists():
  loose = ["tables", "figures"]  # They read rows and write none.
  assert sorted(COMMANDS) == sorted([*runners(), *loose])
  for name in loose:
    assert '__name__ == "__main__"' in (FOLDER / f"{name}.py").read_text()


def test_rows_and_pages_of_the_table_exist_and_no_others():
  listed = set()
  for line in LINES:
    for name in re.findall(r"`([\w*]+)`", line[-2]):
      found = set(RESULTS.glob(f"{name}.jsonl"))
      assert found, f"no rows {name}"
      listed |= found
    (page,) = re.findall(r"\]\((.+)\)", line[-1])
    assert (FOLDER / page).exists(), f"no page {page}"
  assert listed == set(RESULTS.glob("*.jsonl"))


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
