"""Pages of the documentation site; `make docs` builds it."""

import inspect
import re
import runpy

import jaxmotion
from tests.paths import ROOT

CONFIG = runpy.run_path(str(ROOT / "docs" / "conf.py"))
# A line is a page, or a title and a page in angle brackets.
INDEX = [
  re.sub(r".*<(.+)>$", r"\1", line)
  for line in (ROOT / "docs" / "index.md").read_text().splitlines()
]


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


def test_the_index_lists_every_page():
  folder = ROOT / "docs"
  pages = {
    str(path.relative_to(folder).with_suffix(""))
    for path in folder.rglob("*.md")
  }
  assert pages - {"index"} <= set(INDEX)


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
