"""Every argument of every public function refuses wrong values by its name.

Each table of this folder has valid calls of one room. `CALLS` says how a
function is called; `UNCALLED` why it is not, by name or
pattern; `ACCEPTED` which values that look
wrong are right; `KNOWN_BAD` which arguments are still to be mended.
"""

import fnmatch
import importlib

import pytest

from tests.arguments.calls import public_names
from tests.arguments.judge import find_defects
from tests.test_architecture import PRESENT

TABLES = {
  room: importlib.import_module(f"tests.arguments.{room}") for room in PRESENT
}
CALLS = {
  name: (table, call)
  for table in TABLES.values()
  for name, call in table.CALLS.items()
}


@pytest.mark.parametrize("room", PRESENT)
def test_every_public_function_has_a_call_or_a_reason(room):
  table = TABLES[room]
  names = set(public_names(room))
  called = {name.split("->")[0].strip() for name in table.CALLS}
  matched = {
    pattern: set(fnmatch.filter(names - called, pattern))
    for pattern in table.UNCALLED
  }
  assert all(matched.values()), "a reason for no function"
  assert names - called - set().union(*matched.values()) == set()
  assert {name for name, _ in table.KNOWN_BAD} <= set(table.CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments_are_refused_by_name(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # A string is a path where files are written.
  table, call = CALLS[name]
  known = {argument for n, argument in table.KNOWN_BAD if n == name}
  defects = find_defects(name, call, table.ACCEPTED, known)
  report = [
    f"{argument}: {defect}"
    for argument, found in defects.items()
    if argument not in known
    for defect in found
  ]
  assert not report, "\n".join([name, *report])
  mended = known - set(defects)
  assert not mended, f"remove {name}, {sorted(mended)} from KNOWN_BAD"
