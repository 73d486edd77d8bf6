"""Pages of the built site in a browser; `make site-check` runs these tests."""

import json
import subprocess
import sys

import pytest

from tests.paths import ROOT

SITE = ROOT / "site"
# Pixels of a desktop's window and of a phone.
WIDTHS = (1400, 390)

pytestmark = [
  pytest.mark.slow,
  pytest.mark.skipif(
    not (SITE / "index.html").exists(), reason="`make docs` builds the site"
  ),
]


def ask_browser(pages=(), queries=(), site=SITE):
  asked = {"site": str(site), "widths": WIDTHS}
  asked |= {"pages": list(pages), "queries": list(queries)}
  done = subprocess.run(
    [sys.executable, "-m", "tests.site.browser"],
    capture_output=True,
    cwd=ROOT,
    input=json.dumps(asked),
    text=True,
  )
  if done.returncode:
    raise RuntimeError(done.stderr.splitlines()[-1])
  return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(autouse=True, scope="module")
def browser():
  """Skips without the extra `browser` or the libraries that it needs."""
  try:
    ask_browser()
  except RuntimeError as error:
    pytest.skip(f"no browser: {error}")


def test_planted_faults_are_found(tmp_path):
  (tmp_path / "bad.html").write_text(
    "<div style='width: 500px'>wide</div><script>console.error('planted')"
    "</script><img src='http://site.invalid/picture.png'>"
  )
  found = ask_browser(["bad.html", "none.html"], site=tmp_path)["problems"]
  assert found["none.html"] == ["is not loaded"]
  wide, *said = found["bad.html"]
  assert wide.endswith("pixels wider than 390")
  picture = "asks for http://site.invalid/picture.png"
  assert said == ["console: planted", picture]


# Sources are as many as all other pages.
@pytest.mark.parametrize("folder", ["pages", "reference", "_modules"])
def test_pages_fit_and_need_no_network(folder):
  found = [str(path.relative_to(SITE)) for path in SITE.rglob("*.html")]
  own = [page for page in found if page.startswith(f"{folder}/")]
  if folder == "pages":
    others = ("reference/", "_modules/")
    own = [page for page in found if not page.startswith(others)]
  assert own
  problems = ask_browser(sorted(own))["problems"]
  assert {page: said for page, said in problems.items() if said} == {}


def test_the_search_finds_first_what_a_newcomer_means():
  expected = {
    "quantize": "reference/names/jaxmotion.codecs.uniform.html",
    "int8": "reference/names/jaxmotion.codecs.uniform.html",
    "out of memory": "howto/out_of_memory.html",
  }
  found = ask_browser(queries=expected)["first"]
  # An address may have a place within the page, or what to highlight.
  pages = {q: url.split("#")[0].split("?")[0] for q, url in found.items()}
  assert pages == expected
