"""Configuration of the documentation site, which `make docs` builds.

Pages of the reference are made from docstrings: one for each public name.
"""

import importlib
import inspect
import os
import pathlib
import re
import socket
import sys
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOMS = (
  "transforms",
  "codecs",
  "presets",
  "collectives",
  "checkpoint",
  "monitor",
  "memory",
  "nnx",
  "linen",
  "planner",
  "perfmodel",
  "calibration",
  "hetero",
  "islands",
  "controllers",
  "wire",
  "testing",
)

project = "jaxmotion"
author = "the jaxmotion authors"
copyright = f"2026, {author}"
extensions = [
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.intersphinx",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
  "myst_nb",
  "sphinx_copybutton",
]
exclude_patterns = [".jupyter_cache", "results", "static", "templates"]
templates_path = ["templates"]
html_theme = "sphinx_book_theme"
html_title = "jaxmotion"
# The sidebar of a page lists the names of its own room alone. With those of all
# rooms on each of 425 pages, a build took 109 s of CPU time more.
# The box for the search is that of the sidebar alone.
html_theme_options = {
  "show_toc_level": 2,
  "collapse_navbar": True,
  "navbar_persistent": [],
}
html_context = {"default_mode": "auto"}
html_static_path = ["static"]
html_css_files = ["site.css"]

# Single backticks link to what they name, if it is public.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# A longer signature has a line for each parameter.
python_maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_use_rtype = False
autosummary_imported_members = True
# By name: a site that exists does not know of a room that was added since.
autosummary_generate = [
  f"reference/{room}.rst" for room in ("jaxmotion", *ROOMS)
]
# Words for which the search finds a name first, though its page lacks them.
autosummary_context = {
  "searched": {"jaxmotion.codecs.uniform": "! quantize, ! int8"}
}
myst_enable_extensions = ["colon_fence", "dollarmath"]
html_math_renderer = "mathml"
myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
# Tutorials are run once, and again after they change or after `make clean`:
# an error ends the build. What they printed stays in docs/.jupyter_cache.
nb_execution_mode = "cache"
nb_execution_cache_path = str(HERE / ".jupyter_cache")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "image/svg+xml", 0)]


def _is_online() -> bool:
  """Returns whether pages of other projects can be linked to."""
  if os.environ.get("DOCS_OFFLINE"):
    return False
  try:
    socket.create_connection(("docs.jax.dev", 443), timeout=3).close()
  except OSError:
    return False
  return True


# The inventories of other projects need a network. Without one, names of theirs
# are text.
intersphinx_mapping = (
  {
    "jax": ("https://docs.jax.dev/en/latest", None),
    "optax": ("https://optax.readthedocs.io/en/latest", None),
    "flax": ("https://flax.readthedocs.io/en/latest", None),
    "numpy": ("https://numpy.org/doc/stable", None),
  }
  if _is_online()
  else {}
)


def list_names(module: str) -> list[str]:
  """Returns the public functions and classes of a module.

  Its page says what constants and types are.

  Args:
    module: its full name.

  Example:
    >>> list_names("jaxmotion.presets")[:2]
    ['dgc', 'ef21_sgdm']
  """
  loaded = importlib.import_module(module)
  names = [name for name in vars(loaded) if not name.startswith("_")]
  # The package itself loads its names when they are first used.
  known = {n: getattr(loaded, n) for n in getattr(loaded, "__all__", names)}
  return [
    name
    for name, value in known.items()
    if inspect.isfunction(value) or inspect.isclass(value)
  ]


def write_reference(folder: pathlib.Path) -> None:
  """Writes a page with a table of the names of each room.

  Args:
    folder: of the pages; the pages of names go below it.
  """
  folder.mkdir(exist_ok=True)
  known = set()
  for room in ("", *ROOMS):
    module = f"jaxmotion.{room}".rstrip(".")
    known |= {f"{module}.{name}" for name in list_names(module)}
    lines = [
      module,
      "=" * len(module),
      "",
      f".. automodule:: {module}",
      "   :no-members:",
      "",
      f".. currentmodule:: {module}",
      "",
      ".. autosummary::",
      "   :toctree: names",
      "   :nosignatures:",
      "",
      *(f"   {name}" for name in list_names(module)),
      "",
    ]
    path = folder / f"{room or 'jaxmotion'}.rst"
    text = "\n".join(lines)
    # An unchanged page is not built again.
    if not path.exists() or path.read_text() != text:
      path.write_text(text)
  # Names that are public no longer would fail the build.
  for path in folder.glob("names/*.rst"):
    if path.stem not in known:
      path.unlink()


def escape_text(text: str) -> str:
  r"""Returns a line of a docstring as reStructuredText wants it.

  Args:
    text: line, with single backticks, signatures and absolute values.

  Example:
    >>> print(escape_text("(x, *, key, **rest) of `Codec`s, |x| and `|x|`"))
    (x, \*, key, \*\*rest) of `Codec`\ s, \|x\| and `|x|`
  """
  parts = re.split(r"(`[^`]*`)", text)
  for i in range(0, len(parts), 2):
    part = parts[i].replace("|", r"\|")
    part = re.sub(r"(?<=[ (])\*(?=, |args,|\w+\))", r"\\*", part)
    part = re.sub(r"\*\*(?=\w+[),])", r"\\*\\*", part)
    is_plural = i > 0 and part[:1].isalpha()
    parts[i] = rf"\ {part}" if is_plural else part
  return "".join(parts)


def escape_lines(lines: list[str]) -> None:
  """Escapes the text of a docstring in place, without examples and formulas.

  Args:
    lines: of the docstring.
  """
  formula_indent: int | None = None
  for i, line in enumerate(lines):
    text = line.lstrip()
    indent = len(line) - len(text)
    if formula_indent is not None and text and indent <= formula_indent:
      formula_indent = None
    if text.startswith(".. math::"):
      formula_indent = indent
    if formula_indent is None and not text.startswith((">>>", "...")):
      lines[i] = escape_text(line)


def write_formula(writer: Any, node: Any) -> None:
  """Writes a formula as MathML, which browsers draw without a script.

  Args:
    writer: of the page.
    node: formula of a line, or in a block of its own.
  """
  # Tests read this file without the extra `docs`.
  from docutils.nodes import SkipNode, math_block
  from latex2mathml.converter import convert

  formula = node.astext()
  if isinstance(node, math_block):
    if "&" in formula:
      formula = rf"\begin{{split}}{formula}\end{{split}}"
    written = f'<div class="math">{convert(formula, display="block")}</div>'
  else:
    written = convert(formula)
  writer.body.append(written)
  raise SkipNode


def highlight_blocks(app: Any, document: Any) -> None:
  """Highlights blocks that name no language as Python, if they are.

  Args:
    app: that builds the site.
    document: tree of a page.
  """

  def is_plain(node: Any) -> bool:
    return getattr(node, "attributes", {}).get("language") == "none"

  for block in document.findall(is_plain):
    block["language"] = "default"


def find_source(app: Any, module: str, name: str) -> str | None:
  """Returns the private module whose source has a public class.

  Args:
    app: that builds the site.
    module: full name of the module that the class says it is of.
    name: of the class or of its attribute.
  """
  # The viewer of sources finds functions by itself.
  first = name.partition(".")[0]
  value = getattr(sys.modules.get(module), first, None)
  if inspect.isclass(value):
    for path, loaded in sorted(sys.modules.items()):
      if path.startswith("jaxmotion.") and vars(loaded).get(first) is value:
        if re.search(rf"^class {first}\b", inspect.getsource(loaded), re.M):
          return path
  return None


def setup(app: Any) -> None:
  """Adds formulas, and writes the reference before Sphinx reads the pages."""
  app.add_html_math_renderer(
    "mathml", (write_formula, None), (write_formula, None)
  )
  app.connect("doctree-read", highlight_blocks)
  app.connect("viewcode-follow-imported", find_source)
  write_reference(HERE / "reference")
  # Before the extension that reads sections such as `Args:`.
  app.connect(
    "autodoc-process-docstring",
    lambda *arguments: escape_lines(arguments[-1]),
    priority=400,
  )
