"""Pages of the documentation site; `make docs` builds it."""

import doctest
import importlib
import inspect
import json
import re
import runpy
import tomllib

import pytest

import jaxmotion
from tests.paths import ROOT

CONFIG = runpy.run_path(str(ROOT / "docs" / "conf.py"))
# A line is a page, or a title and a page in angle brackets.
INDEX = [
  re.sub(r".*<(.+)>$", r"\1", line)
  for line in (ROOT / "docs" / "index.md").read_text().splitlines()
]

# Captions of the index whose pages are not read from start to end.
LOOKED_UP = {"API", "Benchmarks", "Developers"}
USER_PAGE_MAX_WORDS = 1800
USER_PAGES_MAX_WORDS = 22_000  # of all of them
USER_PAGES_MAX_COLUMNS = 8


def read_page(page):
  return (ROOT / "docs" / f"{page}.md").read_text()


def list_user_pages():
  """Pages of the groups of the index that a user reads."""
  text = (ROOT / "docs" / "index.md").read_text()
  for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.M | re.S):
    if re.search(r"^:caption: (.+)$", tree, re.M)[1] in LOOKED_UP:
      continue
    for line in tree.splitlines():
      if line and not line.startswith(":"):
        yield re.sub(r".*<(.+)>$", r"\1", line)


def test_the_reference_has_every_public_room():
  found = {
    name
    for name in jaxmotion.__all__
    if inspect.ismodule(getattr(jaxmotion, name))
  }
  internal = {"core", "kernels", "program", "command"}
  # Rooms that need Flax are imported by those who use it.
  assert set(CONFIG["ROOMS"]) == (found | {"nnx", "linen"}) - internal
  assert {f"reference/{room}" for room in CONFIG["ROOMS"]} <= set(INDEX)


def test_the_readme_is_short():
  assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_the_index_lists_every_page():
  folder = ROOT / "docs"
  pages = {
    str(path.relative_to(folder).with_suffix(""))
    for path in folder.rglob("*.md")
  }
  assert pages - {"index"} <= set(INDEX)


def test_the_index_has_all_groups():
  captions = re.findall(
    r"^:caption: (.+)$", (ROOT / "docs" / "index.md").read_text(), re.M
  )
  assert {*LOOKED_UP, "Tutorials", "Explanation", "Reference"} <= set(captions)


def test_all_user_pages_together_are_short():
  words = {page: len(read_page(page).split()) for page in list_user_pages()}
  assert sum(words.values()) <= USER_PAGES_MAX_WORDS, words


@pytest.mark.parametrize("page", [*list_user_pages()])
def test_a_user_page_is_short_and_its_tables_are_narrow(page):
  text = read_page(page)
  assert len(text.split()) <= USER_PAGE_MAX_WORDS
  # The line below the header of a table has a rule for each column.
  rules = re.findall(r"^\|(?:\s*:?-+:?\s*\|)+$", text, re.M)
  assert max((rule.count("|") - 1 for rule in rules), default=0) <= (
    USER_PAGES_MAX_COLUMNS
  )


@pytest.mark.parametrize(
  "page",
  sorted((ROOT / "docs" / "benchmarks").glob("*.md")),
  ids=lambda p: p.stem,
)
def test_rows_of_a_benchmark_have_a_date_and_a_commit(page):
  text = page.read_text()
  parts = re.split(r"`(?:docs/results/)?[\w*]+\.jsonl`", text)
  for after in parts[1:]:
    words = re.split(r"\n- |\|", after[:100])[0]
    assert re.search(r"\d{4}-\d\d-\d\d", words), words
    assert re.search(r"commit(ted in)?\s`?[0-9a-f]{7,8}\b", words), words


def read_rows(name):
  path = ROOT / "docs" / "results" / f"{name}.jsonl"
  return [json.loads(line) for line in path.read_text().splitlines()]


def read_values(name):
  """Values of a file of rows by case and metric."""
  return {(r["case"], r["metric"]): r["value"] for r in read_rows(name)}


def read_times(name):
  found = read_values(name)
  return {case: v for (case, metric), v in found.items() if metric == "step_ms"}


def list_accuracy_figures():
  """Sentences on test accuracy, as the rows say them."""
  accuracy = {
    name: read_values(f"train_digits_{name}") for name in ("adamw", "sharded")
  }

  def lost(case, digits, name="adamw"):
    full, own = (accuracy[name][c, "test_accuracy"] for c in ("fp32", case))
    return f"{full - own:.{digits}f}"

  int4, sign = ("int4_feedback", "sign_feedback")
  yield (
    "README.md",
    f"8 bits lose {lost('int8', 2)} points, 4 bits {lost(int4, 2)} and one bit "
    f"{lost(sign, 1)}",
  )
  yield (
    "docs/concepts/error_feedback.md",
    f"4 bits lost {lost(int4, 1)} points, 1 bit {lost(sign, 1)} and 1 % top-k "
    f"{lost('topk1_feedback', 1)}",
  )
  yield (
    "docs/sharded.md",
    f"On digits 8 bits lost {lost('sharded_int8', 2, 'sharded')} points of "
    f"accuracy and 4 bits {lost('sharded_int4', 2, 'sharded')}",
  )
  plain, coded = (accuracy["adamw"][c, "test_accuracy"] for c in ("fp32", int4))
  yield "docs/howto/which_codec.md", f"{coded:.2f} ± "
  yield "docs/howto/which_codec.md", f"instead of {plain:.2f} ± "


def list_time_figures():
  """Sentences on seconds, as the rows say them."""
  hosts = read_times("hosts_2_1gbit_overlap")
  gain = f"{hosts['fp32'] / hosts['int8']:.1f} times faster with int8"
  yield "docs/hosts.md", gain
  measured = read_values("gpu")
  off = {
    case: ms / measured[case, "step_ms"] - 1
    for (case, metric), ms in measured.items()
    if metric == "step_ms_predicted"
  }
  looped = ("gpt/", "llama/", "encoder_decoder/")
  flat = ("vision", "graph", "resnet50")
  worst = max(abs(gap) for case, gap in off.items() if case.startswith(looped))
  ratio = max(1 / (1 + g) for case, g in off.items() if case.startswith(flat))
  yield (
    "docs/fit_memory.md",
    f"within {100 * worst:.0f} % of the measured ones for transformers in "
    f"loops. Models without loops took up to {ratio:.1f} times as long",
  )
  errors = {
    row["experiment"].removeprefix("perfmodel_validate_"): 100 * row["value"]
    for row in read_rows("perfmodel_validate")
    if (row["case"], row["metric"]) == ("all", "mape")
  }
  # Calibrated were 2 and 4 emulated devices.
  other = errors.pop("emulated3")
  least, most = min(errors.values()), max(errors.values())
  yield (
    "docs/howto/predict_a_step.md",
    f"mean errors were {least:.0f} to {most:.0f} % of the measured step. They "
    f"were {other:.0f} % for another number",
  )


def list_byte_figures():
  """Sentences on bytes, as the rows say them."""
  adamw = read_values("hosts_2_1gbit_adamw")
  ratio = adamw["sharded_int4", "wire_ratio"]
  yield "docs/sharded.md", f"send {ratio:.1f} times fewer bytes than float32"
  sharded = read_values("train_sharded_memory")
  sent = [
    sharded[f"hosts_{name}", "hosts"] for name in ("int8_int4_local", "float32")
  ]
  assert round(sent[1] / sent[0]) == 8
  yield "docs/sharded.md", "sent an eighth of float32's bytes between hosts"
  state = read_values("state_compiled")
  mib = state["adam/16x2048x2048/packed_host", "temp_bytes"] / 2**20
  yield "docs/state.md", f"that is {mib:.0f} MiB instead of 512"
  memory = read_values("planner_memory")
  cases = [c for c, metric in memory if metric == "device_bytes_predicted"]
  models = {case.partition("/")[0] for case in cases}
  errors = [
    memory[c, "device_bytes_predicted"] / memory[c, "device_bytes"] - 1
    for c in cases
  ]
  assert max(map(abs, errors)) <= 0.15 and len(models) == 8
  yield (
    "docs/fit_memory.md",
    f"within 15 % of the compiler's figure for an H100 in all {len(cases)} "
    "plans of eight models",
  )
  near, plans = (
    sum(
      row[field]
      for row in read_rows("planner_memory")
      if row["metric"] == "plans_within_15_percent"
    )
    for field in ("value", "baseline")
  )
  yield (
    "docs/perfmodel.md",
    f"within 15 %](benchmarks/fit_memory.md) of the compiler's figure for "
    f"{near} of {plans:.0f} steps of eight models",
  )


@pytest.mark.parametrize(
  "figures", [list_accuracy_figures, list_time_figures, list_byte_figures]
)
def test_figures_in_sentences_are_those_of_the_rows(figures):
  for page, text in figures():
    assert text in " ".join((ROOT / page).read_text().split()), page


@pytest.mark.parametrize("room", ["", *CONFIG["ROOMS"]])
def test_every_public_name_has_an_example_that_runs(room):
  module = importlib.import_module(f"jaxmotion.{room}".rstrip("."))
  names = [name for name in vars(module) if not name.startswith("_")]
  found = {test.name for test in doctest.DocTestFinder().find(module)}
  without = []
  for name in getattr(module, "__all__", names):
    value = getattr(module, name)
    if inspect.ismodule(value):
      continue
    if inspect.isclass(value):
      # What another room has is its own to show.
      place = f"{value.__module__}.{name}"
      text = value.__doc__ if place in found or room == "" else None
    elif inspect.isfunction(value):
      text = value.__doc__
    else:  # A constant or a type, which has no docstring of its own.
      text = module.__doc__ if f"{room}.{name}" in module.__doc__ else None
    if ">>> " not in (text or ""):
      without.append(name)
  assert without == []


def test_the_version_is_the_same_everywhere():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  citation = (ROOT / "CITATION.cff").read_text()
  assert project["version"] == jaxmotion.__version__
  assert f"\nversion: {jaxmotion.__version__}\n" in citation
  # A release has a heading of its own.
  number = jaxmotion.__version__.partition(".dev")[0]
  is_open = number != jaxmotion.__version__
  heading = f"## {number} (not yet released)" if is_open else f"## {number} "
  assert f"\n{heading}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_reference_of_the_package_lists_its_functions():
  names = CONFIG["list_names"]("jaxmotion")
  assert {"exchange", "PerWorker"} <= set(names)
  assert "codecs" not in names


def test_pages_of_names_that_are_gone_are_removed(tmp_path):
  names = tmp_path / "names"
  names.mkdir()
  for name in ("jaxmotion.codecs.gone", "jaxmotion.codecs.sign"):
    (names / f"{name}.rst").touch()
  CONFIG["write_reference"](tmp_path)
  assert [path.stem for path in names.iterdir()] == ["jaxmotion.codecs.sign"]


def test_a_page_of_the_reference_lists_the_names_of_its_room(tmp_path):
  CONFIG["write_reference"](tmp_path)
  text = (tmp_path / "presets.rst").read_text().splitlines()
  assert {"   demo", "   power_sgd"} <= set(text)


def test_a_public_class_links_to_the_file_that_defines_it():
  found = CONFIG["find_source"](None, "jaxmotion.codecs", "feedback.encode")
  assert found == "jaxmotion.codecs._combinators._feedback"
  assert CONFIG["find_source"](None, "jaxmotion.codecs", "none") is None
