"""Every argument of every public function refuses wrong values by its name.

Each table of this folder has valid calls of one room; see `Table`.
"""

import fnmatch
import inspect

import pytest

from tests.arguments.calls import find_public, public_names, read_table
from tests.arguments.judge import find_defects
from tests.test_architecture import PRESENT

NO_DEFAULTS = (inspect.Parameter.empty, None)
TABLES = {room: read_table(room) for room in PRESENT}
CALLS = {
  name: (table, call)
  for table in TABLES.values()
  for name, call in table.calls.items()
}


@pytest.mark.parametrize("room", PRESENT)
def test_every_call_and_reason_is_of_a_public_function(room):
  table, names = TABLES[room], set(public_names(room))
  called = {name.split("->")[0].strip() for name in table.calls}
  for pattern in table.uncalled:
    assert fnmatch.filter(names - called, pattern), "a reason for no function"
  assert {name for name, _ in table.known_bad} <= set(table.calls)


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_refused_by_name(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # A string is a path where files are written.
  table, call = CALLS[name]
  known = {argument for n, argument in table.known_bad if n == name}
  defects = find_defects(name, call, table.accepted, known)
  report = [
    f"{argument}: {defect}"
    for argument, found in defects.items()
    if argument not in known
    for defect in found
  ]
  assert not report, "\n".join([name, *report])
  mended = known - set(defects)
  assert not mended, f"remove {name}, {sorted(mended)} from KNOWN_BAD"


@pytest.mark.parametrize("room", PRESENT)
def test_defaults_are_of_the_declared_kinds(room):
  # They are not checked when a function is called.
  for name in public_names(room):
    target = find_public(name)
    kinds = getattr(target, "declared", {})
    for argument, parameter in inspect.signature(target).parameters.items():
      default = parameter.default
      is_made = repr(default) == "<factory>"  # A field that each object makes.
      if argument in kinds and not is_made and default not in NO_DEFAULTS:
        assert kinds[argument](argument, default) == default, (name, argument)
