"""Pages of the documentation site; `make docs` builds it."""

import doctest
import importlib
import inspect
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
