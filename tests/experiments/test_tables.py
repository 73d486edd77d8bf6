import fnmatch
import re

import absl.app
import pytest
from PIL import Image

from experiments import figures, history, tables
from experiments.common import records
from experiments.common.console import JobError
from experiments.common.tables import Table
from experiments.race import rows as race_rows
from tests.paths import ROOT

PAGES_OF_ROWS = {
  "docs/benchmarks/exchanges.md": [
    *("train_digits", "train_digits_adamw"),
    *("train_digits_sharded", "train_bytes_lm_sharded"),
  ],
  "docs/benchmarks/hosts.md": [
    *("hosts_2_1gbit_overlap", "hosts_2_100mbit_overlap"),
    *("hosts_2_1gbit_rtt10ms_overlap", "hosts_2_none_overlap"),
    *("hosts_3_1gbit_overlap", "hosts_2_1gbit_streaming"),
    "hosts_2_1gbit_adamw",
  ],
  "docs/history.md": ["history"],
  "docs/benchmarks/weights.md": ["weights_vgg"],
  "docs/benchmarks/activations.md": ["activations"],
  "docs/benchmarks/hetero.md": ["hetero"],
  "docs/benchmarks/residuals.md": ["residuals_compare", "residuals_resident"],
  "docs/benchmarks/residuals_gpu.md": ["gpu"],
  "docs/benchmarks/residual_networks.md": ["residuals", "residuals_accuracy"],
  "docs/benchmarks/study.md": ["study_decoder", "study_decoder_8"],
  "docs/benchmarks/links.md": ["planner_links"],
  "docs/benchmarks/fit_memory.md": ["planner_memory"],
  "docs/benchmarks/islands.md": [
    *("islands_simulated", "islands_links", "islands_faults"),
  ],
  "docs/benchmarks/race.md": ["race"],
  "docs/benchmarks/sharded.md": ["train_sharded_memory"],
  "docs/benchmarks/programs.md": [
    *("codecs_programs", "codecs_programs_h200", "codecs_launches"),
  ],
}


@pytest.mark.parametrize("page", PAGES_OF_ROWS)
def test_the_tables_of_pages_are_made_of_the_rows(page):
  text = (ROOT / page).read_text()
  for name in PAGES_OF_ROWS[page]:
    rows = records.read_rows(ROOT / "docs" / "results" / f"{name}.jsonl")
    assert tables.render_markdown(rows) in text, name


def test_the_times_of_codecs_are_those_of_the_rows():
  """In tables whose cells are all filled."""
  page = (ROOT / "docs" / "benchmarks" / "codecs.md").read_text()
  folder = ROOT / "docs" / "results"
  rows = records.read_rows(folder / "codecs.jsonl")
  encoding = [row for row in rows if row.metric.startswith("encode")]
  rest = [row for row in rows if not row.metric.startswith("encode")]
  shapes = records.read_rows(folder / "codecs_shapes.jsonl")
  alone = [row for row in shapes if "buckets" not in row.case]
  for part in (encoding, rest, alone):
    table = tables.render_markdown(part)
    assert "|  |" not in table
    assert table in page


def read_values(name):
  """Values of a file of rows by case and metric."""
  path = ROOT / "docs" / "results" / f"{name}.jsonl"
  return {(r.case, r.metric): r.value for r in records.read_rows(path)}


def read_table(page, header):
  """Lines of the table of a page that has this header."""
  text = (ROOT / "docs" / page).read_text()
  return text.split(f"{header}\n")[1].split("\n\n")[0].splitlines()[1:]


def check_table(page, header, cases, find_cells):
  """Asserts that a table has the cells of each labelled case, by model."""
  lines = read_table(page, header)
  for (label, case), line in zip(cases.items(), lines, strict=True):
    cells = [c for m in ("gpt", "resnet50") for c in find_cells(f"{m}/{case}")]
    assert line == f"| {' | '.join([label, *cells])} |"


def test_the_largest_batches_are_those_of_the_rows():
  values = read_values("residuals_resident")
  modes = "plain", "lossless", "int8", "int4", "jax_checkpoint"
  sizes = [
    values[f"{mode}/batch", "size"] for mode in (*modes, "lossless_least")
  ]
  plain, lossless, _, int4, *_ = sizes
  shown = f"{plain} plain, {lossless} lossless and {int4} in 4 bits"
  assert shown in (ROOT / "README.md").read_text()
  ratios = [f"{size / plain:.1f}" for size in sizes[1:]]
  page = (ROOT / "docs" / "benchmarks" / "residuals.md").read_text()
  text = page.split("- Lossless training takes")[1].split(" times. Steps")[0]
  assert re.findall(r"\d\.\d", text) == ratios


def test_the_memory_that_is_saved_is_that_of_the_rows():
  values = read_values("residuals_compare")
  both = {
    "plain": "plain",
    "`dots_saveable` of each block": "jax_block_dots",
    "all names but the scores": "jax_block_names_but_scores",
    "`dots_with_no_batch_dims_saveable` of each block": "jax_block_no_batch",
    "lossless": "ours",
    "lossless, `memory_budget=0.5`": "ours_budget_0.5",
    "`jax.checkpoint` of each block": "jax_block_nothing",
    "lossless, `memory_budget=0`": "ours_budget_0",
    "8 bits": "ours_8bits",
    "4 bits": "ours_4bits",
  }
  header = (
    "| | GPT: MiB | TFLOP | step, ms | ResNet-50: MiB | TFLOP | step, ms |"
  )

  def find_cells(case):
    if (case, "temp_bytes") not in values:
      return ["-"] * 3
    mib = float(values[case, "temp_bytes"]) / 2**20
    tflop = float(values[case, "flops"]) / 1e12
    ms = float(values[case, "step_ms_predicted"])
    return [f"{mib:,.0f}", f"{tflop:.2f}", f"{ms:.1f}"]

  check_table("benchmarks/residuals.md", header, both, find_cells)


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks/race.md"])
def test_the_gains_of_the_race_are_those_of_the_rows(page):
  rows = records.read_rows(ROOT / "docs" / "results" / "race.jsonl")
  table = race_rows.gain_table(rows).to_markdown()
  assert table.count("\n") > 4
  assert table in (ROOT / page).read_text()


def test_steps_on_a_gpu_are_those_of_the_rows():
  values = read_values("gpu")
  cases = {
    "plain": "plain",
    "`jax.checkpoint` of each block": "jax_block_nothing",
    "`compress_residuals`, lossless": "ours",
    "in 8 bits": "ours_8bits",
    "in 4 bits": "ours_4bits",
    "on the host": "ours_host",
  }
  header = "| residuals | GPT: ms | GB | ResNet-50: ms | GB |"

  def find_cells(case):
    gb = float(values[case, "temp_bytes"]) / 1e9
    ms = float(values[case, "step_ms"])
    return [f"{ms:.1f}", f"{gb:.{1 if case.startswith('gpt') else 2}f}"]

  check_table("residuals.md", header, cases, find_cells)


def test_the_memory_of_the_readme_is_that_of_the_rows():
  values, readme = read_values("gpu"), (ROOT / "README.md").read_text()
  cases = {
    "plain": "plain",
    "`jax.checkpoint` of each block": "jax_block_nothing",
    "`compress_residuals`, lossless": "ours",
    "the same in 4 bits": "ours_4bits",
  }
  for label, case in cases.items():
    ms, nbytes = (
      float(values[f"gpt/{case}", metric])
      for metric in ("step_ms", "temp_bytes")
    )
    assert f"| {label} | {ms:.1f} | {nbytes / 1e9:.1f} |" in readme


LINKS = (
  "| network | link | no exchange, ms | float32, ms | plan, ms | faster"
  " | codecs of the plan: tensors |"
)


def test_links_on_which_compression_pays_are_those_of_the_rows():
  values = read_table("benchmarks/links.md", LINKS)
  cells = [line.strip("| ").split(" | ") for line in values]
  half = len(cells) // 2
  header = (
    "| link | GPT: float32, ms | plan, ms | faster"
    " | ResNet-50: float32, ms | plan, ms | faster |"
  )
  lines = read_table("howto/will_it_pay.md", header)
  for gpt, resnet, line in zip(cells[:half], cells[half:], lines, strict=True):
    assert gpt[1] == resnet[1]
    assert line == f"| {' | '.join([gpt[1], *gpt[3:6], *resnet[3:6]])} |"


def test_the_fastest_codec_of_each_link_is_that_of_the_rows():
  path = ROOT / "docs" / "results" / "perfmodel_scaling.jsonl"
  values = {
    (row.experiment.split("_")[-1], row.case): float(row.value)
    for row in records.read_rows(path)
    if row.metric == "predicted_step_ms"
  }
  header = "| Gbit/s | AlexNet | VGG-16 | ResNet-50 | GoogLeNet |"
  rates = ("0.1", "1", "10", "25", "50", "100", "400")
  lines = read_table("benchmarks/scaling.md", header)
  for rate, line in zip(rates, lines, strict=True):
    cells = [rate]
    for network in ("alexnet", "vgg16", "resnet50", "googlenet"):
      times = {
        codec: values[network, f"data{codec} link={rate}"]
        for codec in ("", " bf16", " int8", " sign")
      }
      best = min(times, key=times.__getitem__)
      gain = times[""] / times[best]
      cells.append(f"{best.strip()}, {gain:.3g}x" if best else "fp32")
    assert line == f"| {' | '.join(cells)} |"


def test_the_bytes_of_each_number_of_hosts_are_those_of_the_rows():
  folder = ROOT / "docs" / "results"
  counts = (2, 4, 8)
  values = {
    (row.case, hosts, row.metric): float(row.value)
    for hosts in counts
    for row in records.read_rows(folder / f"hosts_{hosts}_bytes.jsonl")
  }
  lines = []
  for case in dict.fromkeys(case for case, _, _ in values):
    cells = [case]
    for hosts in counts:
      for kind in ("predicted", "counted"):
        found = values[case, hosts, f"wire_bytes_{kind}"]
        cells.append(f"{found / 1e3:,.1f}")
    lines.append(f"| {' | '.join(cells)} |\n")
  page = (ROOT / "docs" / "benchmarks" / "hosts.md").read_text()
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
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]


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
  with Image.open(drawn) as image:
    assert (image.format, image.size) == ("PNG", (1400, 900))
    # There is something in it.
    assert len(set(image.convert("L").resize((100, 100)).tobytes())) > 10
