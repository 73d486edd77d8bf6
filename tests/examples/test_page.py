"""The page shows the differences that the trainers have."""

import difflib
import re

import pytest

from tests.examples.test_trainers import STYLES, code_lines, load
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "adapters.md").read_text()
SHOWN = dict(re.findall(r"`(\w+)\.py`\n\n```diff\n(.*?)```", PAGE, re.DOTALL))


def test_every_style_is_shown():
  assert sorted(SHOWN) == sorted(STYLES)


@pytest.mark.parametrize("style", STYLES)
def test_the_difference_is_that_of_the_trainers(style):
  old, new = code_lines(load(style)), code_lines(load(style, "_compressed"))
  lines = difflib.unified_diff(old, new, n=0, lineterm="")
  changed = [s for s in lines if not s.startswith(("---", "+++", "@@"))]
  assert SHOWN[style].splitlines() == changed
