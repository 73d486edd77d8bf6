"""The walls of the house, walked."""

import ast
import dataclasses
import functools
import importlib
import inspect
import subprocess
import sys

import pytest

from tests.paths import ROOT

PACKAGE = ROOT / "jaxmotion"
ROOMS = {
  "core": 0,
  "program": 1,
  "controllers": 1,
  "hosts": 2,
  "kernels": 3,
  "codecs": 4,
  "wire": 5,
  "collectives": 6,
  "perfmodel": 7,
  "transforms": 7,
  "memory": 8,
  "hetero": 8,
  "testing": 8,
  "checkpoint": 8,
  "islands": 8,
  "presets": 8,
  "calibration": 8,
  "monitor": 9,
  "planner": 9,
  "linen": 9,
  "nnx": 9,
  "command": 10,
}
# Rooms in folders: a folder imports only folders of its room on lower floors.
FLOORS = {
  "codecs": {"_arrays": 0, "_combinators": 1},
  "transforms": {"_step": 0, "_schemes": 1},
  "memory": {"residuals": 0, "_weights": 1},
  "memory.residuals": {"trace": 0, "choose": 1, "run": 2},
  "planner": {"exchange": 0, "residuals": 0},
}
# The most pairs (importer, imported) of folders and loose files of a room.
ARROWS = {
  "memory.residuals": 15,
  "perfmodel": 33,
  "hosts": 4,
  "core": 8,
  "codecs": 26,
  "collectives": 32,
  "transforms": 30,
}
# What the package may import besides itself and the standard library.
ALLOWED = {"jax", "numpy", "optax"}
# What one room may import besides; nothing imports that room.
EXTRAS = {"linen": {"flax"}, "nnx": {"flax"}, "islands": {"obstore"}}


def each(things):
  """Makes a check of one thing a test of all, which says what fails and why."""

  def make_test(check):
    def test():
      failures = []
      for thing in things:
        try:
          check(thing)
        except AssertionError as error:
          failures.append(f"{thing}: {error}")
      assert things
      assert not failures, "\n".join(failures)

    return test

  return make_test


FILES = each(sorted(PACKAGE.rglob("*.py")))
PRESENT = sorted(d.parent.name for d in PACKAGE.glob("*/__init__.py"))


@functools.cache
def parsed(path):
  return ast.parse(path.read_text())


@functools.cache
def nodes(path):
  """All nodes of a file, which most checks look at."""
  return tuple(ast.walk(parsed(path)))


@functools.cache
def imports(path):
  """(module, name or None) of every import, wherever it stands."""
  found = []
  for node in nodes(path):
    if isinstance(node, ast.Import):
      found += ((alias.name, None) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"{path} imports relatively"
      found += ((node.module, alias.name) for alias in node.names)
  return found


def own_imports(path):
  """Dotted paths below jaxmotion of what is imported from it."""
  for module, name in imports(path):
    if module.split(".")[0] == "jaxmotion":
      full = module.split(".")[1:] + ([name] if name else [])
      yield full


def room_of(path):
  parts = path.relative_to(PACKAGE).parts
  return parts[0] if len(parts) > 1 else None


def public(room):
  """(name, object) of what a room and its folders offer and define."""
  folder = PACKAGE / room
  floors = set(FLOORS.get(room, ())) - {"residuals"}
  names = [room] + [
    f"{room}.{d.parent.name}"
    for d in folder.glob("*/__init__.py")
    if d.parent.name not in floors
  ]
  names += [f"{room}.extend"] if (folder / "extend.py").exists() else []
  for name in names:
    module = importlib.import_module(f"jaxmotion.{name}")
    for attribute, value in vars(module).items():
      where = getattr(value, "__module__", None) or ""
      if (
        not attribute.startswith("_")
        and where.startswith(f"jaxmotion.{room}")
        and (inspect.isfunction(value) or inspect.isclass(value))
      ):
        yield f"{name}.{attribute}", value


PUBLIC = dict(item for room in PRESENT for item in public(room))


def test_every_room_is_in_the_table():
  assert set(PRESENT) <= set(ROOMS)
  assert {"core", "codecs", "collectives"} <= set(PRESENT)


@FILES
def test_a_room_imports_only_rooms_below_it(path):
  room = room_of(path)
  if room is None:
    return  # the top of the package gathers the rooms
  for target, *_ in own_imports(path):
    assert target in ROOMS, f"{path} imports jaxmotion.{target}"
    below = ROOMS[target] < ROOMS[room]
    assert target == room or below, f"{room} imports {target}"


def arrows(room):
  """Pairs (importer, imported) of the folders and loose files of a room."""
  folder = PACKAGE.joinpath(*room.split("."))
  depth = len(room.split("."))
  names = {p.stem for p in folder.iterdir()} - {"__init__", "__pycache__"}
  for path in folder.rglob("*.py"):
    source = path.relative_to(folder).parts[0].removesuffix(".py")
    if source == "__init__":
      continue  # the front of the room gathers its folders
    for full in own_imports(path):
      target = full[depth] if len(full) > depth else None
      if full[:depth] == room.split(".") and target in names - {source}:
        yield source, target


@pytest.mark.parametrize("room", FLOORS)
def test_a_floor_imports_only_floors_below_it(room):
  floors = FLOORS[room]
  folder = PACKAGE.joinpath(*room.split("."))
  assert set(floors) == {p.parent.name for p in folder.glob("*/__init__.py")}
  for source, target in arrows(room):
    if source in floors and target in floors:
      assert floors[target] < floors[source], f"{source} imports {target}"


def experiment_arrows():
  """Pairs (importer, imported) of the folders of experiments."""
  folder = ROOT / "experiments"
  for path in folder.rglob("*.py"):
    source = path.relative_to(folder).parts[0].removesuffix(".py")
    for module, name in imports(path):
      parts = module.split(".") + ([name] if name else [])
      if parts[0] == "experiments" and len(parts) > 1 and parts[1] != source:
        yield source, parts[1]


def test_experiments_import_one_another_in_few_ways_without_rings():
  found = set(experiment_arrows())
  loose = {"tables", "figures"}  # No folders.
  between = {pair for pair in found if not loose & set(pair)}
  assert 0 < len(between) <= 45, sorted(between)
  left = {name for pair in found for name in pair}
  while left:
    free = {n for n in left if not any(a == n and b in left for a, b in found)}
    assert free, f"a ring among {sorted(left)}"
    left -= free


@pytest.mark.parametrize("room", ARROWS)
def test_few_arrows_lead_from_floor_to_floor(room):
  found = set(arrows(room))
  assert found and len(found) <= ARROWS[room], sorted(found)


@FILES
def test_private_files_and_names_stay_in_their_folder(path):
  here = list(path.relative_to(PACKAGE).parent.parts)
  for full in own_imports(path):
    for i in [i for i, part in enumerate(full) if part.startswith("_")]:
      folder = full[:i]
      # Ops build on one another's references: their room is one folder.
      # Folders of these rooms are floors, not walls.
      inner = ["kernels", "codecs", "transforms"]
      folder = folder[:1] if folder[0] in inner else folder
      assert here[: len(folder)] == folder, f"{path} imports {full}"


@FILES
def test_the_package_needs_jax_numpy_and_optax_alone(path):
  for module, name in imports(path):
    top = module.split(".")[0]
    known = ALLOWED | {"jaxmotion"} | sys.stdlib_module_names
    known |= EXTRAS.get(room_of(path), set())
    assert top in known, f"{path} imports {module}"
    full = f"{module}.{name}" if name else module
    assert not full.startswith("jax._"), f"{path} imports {full}"


@FILES
def test_version_shims_are_in_one_file(path):
  if path.relative_to(PACKAGE).as_posix() == "core/_compat.py":
    return
  shims = {"pcast", "pvary", "manual_axis_type", "vma", "axis_size"}
  for node in nodes(path):
    if not isinstance(node, ast.Attribute) or node.attr not in shims:
      continue
    # A method or a field of that name is no shim, one of lax or a type is.
    owner = ast.unparse(node.value)
    fields = {"pcast", "pvary", "manual_axis_type", "vma"}
    assert node.attr not in fields and owner not in ("lax", "jax.lax"), (
      f"{path}:{node.lineno} uses {owner}.{node.attr}"
    )
  for module, name in imports(path):
    theirs = module.split(".")[0] == "jax"
    assert not (theirs and name in shims), f"{module}.{name}"


def lines_of(function):
  """Lines of a function without its docstring."""
  count = function.end_lineno - function.lineno + 1
  if ast.get_docstring(function):
    count -= function.body[0].end_lineno - function.body[0].lineno + 1
  return count


@pytest.mark.parametrize("folder", ["jaxmotion", "experiments", "tests"])
def test_functions_are_short(folder):
  lengths = {
    f"{path.relative_to(ROOT)}: {node.name}": lines_of(node)
    for path in (ROOT / folder).rglob("*.py")
    for node in nodes(path)
    if isinstance(node, ast.FunctionDef)
  }
  assert {p: n for p, n in lengths.items() if n > 120} == {}
  assert lengths


def test_folders_and_signatures_are_small():
  for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert len(files) <= 18, f"{folder}: {sorted(files)}"
  for name, value in PUBLIC.items():
    if inspect.isfunction(value):
      count = len(inspect.signature(value).parameters)
      assert count <= 12, f"{name} has {count} parameters"


@FILES
def test_no_context_is_hidden(path):
  names = {name for _, name in imports(path)} | {m for m, _ in imports(path)}
  assert not {"ContextVar", "contextvars"} & names


# Codecs whose state is memory: other rooms ask `Codec` what it remembers.
REMEMBERING = {"feedback", "ef21", "onebit", "momentum_correction"}


@FILES
def test_rooms_ask_no_codec_for_its_class(path):
  if room_of(path) == "codecs":
    return
  for node in nodes(path):
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
      asked = {
        getattr(n, "attr", getattr(n, "id", None))
        for n in ast.walk(node.args[1])
      }
      assert not asked & REMEMBERING, f"{path}:{node.lineno}"


@FILES
def test_one_file_loads_jax_extend(path):
  if path.relative_to(PACKAGE).as_posix() == "core/_compat.py":
    return
  assert not {m for m, _ in imports(path) if m.startswith("jax.extend")}
  assert ("jax", "extend") not in set(imports(path))


@FILES
def test_a_file_says_what_it_is_for(path):
  assert ast.get_docstring(parsed(path))


# A first line that begins so has no verb of its own.
VERBLESS = set("What How Of Which Where Those From In As Both See That".split())


@FILES
def test_first_lines_of_docstrings_are_sentences(path):
  for node in nodes(path):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
      first = (ast.get_docstring(node) or "x x x x").split("\n\n")[0].split()
      name = getattr(node, "name", "module")
      assert len(first) >= 4, f"{path}: {name}: {first}"
      assert first[0] not in VERBLESS, f"{path}: {name}: {first}"


@FILES
def test_nothing_is_imported_by_string(path):
  if path == PACKAGE / "__init__.py":
    return  # loads its own rooms when they are first used
  assert "importlib" not in {module for module, _ in imports(path)}
  called = [n.func for n in nodes(path) if isinstance(n, ast.Call)]
  assert "__import__" not in map(ast.unparse, called)


@FILES
def test_jaxprs_are_walked_in_one_room(path):
  walks = any(
    isinstance(node, ast.Attribute) and node.attr == "eqns"
    for node in nodes(path)
  )
  known = {  # They look at the one equation of a function they know.
    "memory/residuals/trace/_kinds.py",
    "perfmodel/_ops.py",
  }
  name = path.relative_to(PACKAGE).as_posix()
  assert not walks or room_of(path) == "program" or name in known


# Names of one word that every reader of the field knows.
FIELD_TERMS = set(
  """
  backward body branch config cut decode decoded encode exchange flatten
  forward init kernel leaves level loss matmul merge pack params partition pull
  replan repr reshape run scale scan shape size spec step sum trace transpose
  unpack update advise metrics
  """.split()
)


def test_names_of_functions_have_two_words_or_are_terms():
  names = [
    node.name
    for path in PACKAGE.rglob("*.py")
    for node in nodes(path)
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("__")
  ]
  single = [n for n in names if len(list(filter(None, n.split("_")))) == 1]
  others = [n for n in single if n.strip("_") not in FIELD_TERMS]
  assert len(others) <= 0.3 * len(names), sorted(others)


@each(list(PUBLIC))
def test_public_names_have_docstrings(name):
  value = PUBLIC[name]
  doc = value.__doc__ or ""
  generated = f"{value.__name__}("  # what dataclass and NamedTuple make up
  assert doc and not doc.startswith(generated)


# Helpers whose first line says all about their arguments.
BARE = {
  "core": "small helpers of the other rooms",
  "kernels": "one op each, described by its reference's module",
  "program": "for other rooms; users call what is made of it",
  "hosts": "for other rooms; drivers call what users do not see",
}


def takes_arguments(value):
  if inspect.isclass(value):
    return dataclasses.is_dataclass(value) and bool(dataclasses.fields(value))
  return bool(inspect.signature(value).parameters)


def explained(name, value):
  """Codecs, and functions of the rooms that users call."""
  from jaxmotion.codecs import Codec

  if inspect.isclass(value):
    return issubclass(value, Codec) and value is not Codec
  return name.split(".")[0] not in BARE


EXPLAINED = {n: v for n, v in PUBLIC.items() if explained(n, v)}


# An `..._init` takes the arguments of the collective it is for.
CALLED = {n: v for n, v in EXPLAINED.items() if not n.endswith("_init")}


# The second tier is for other rooms: a sentence says what a function does.
SHOWN = {n: v for n, v in CALLED.items() if ".extend." not in n}


@each([n for n, v in SHOWN.items() if takes_arguments(v)])
def test_arguments_are_described(name):
  assert "Args:" in EXPLAINED[name].__doc__


@each(list(SHOWN))
def test_an_example_shows_the_use(name):
  assert ">>>" in EXPLAINED[name].__doc__


# What a process has loaded, in the order in which it imports more.
IMPORT_MORE = """
import os, sys, jaxmotion
print(*sys.modules)
import jax, numpy, optax
def list_flags():
  flags = sys.modules.get("absl.flags")
  return " ".join(sorted(flags.FLAGS) if flags else [])
print(*sys.modules)
theirs = list_flags()
jaxmotion.exchange
print(*sys.modules)
from jaxmotion import *  # All rooms, which are left to their first use.
print(*sys.modules)
assert list_flags() == theirs
# A backend reads this flag when it starts, once.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
print(jax.device_count())
"""


@pytest.fixture(scope="module")
def loaded():
  """Lines that a process prints as it imports more."""
  done = subprocess.run(
    [sys.executable, "-c", IMPORT_MORE],
    cwd=ROOT,
    env={"PATH": "", "JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    check=True,
  )
  return [line.split() for line in done.stdout.splitlines()]


def test_importing_starts_no_backend(loaded):
  assert loaded[-1] == ["3"]


def test_importing_needs_no_extra(loaded):
  _, theirs, _, every, _ = map(set, loaded)
  extras = {"absl.flags", "flax", "ml_collections", "orbax", "experiments"}
  assert every & extras == theirs & extras


def test_importing_the_package_loads_no_room(loaded):
  tops = {"jaxmotion", "jax", "optax", "numpy"}
  assert [m for m in loaded[0] if m.split(".")[0] in tops] == ["jaxmotion"]


def test_a_room_is_loaded_with_what_it_needs_alone(loaded):
  loaded = loaded[2]
  ours = {m.split(".")[1] for m in loaded if m.startswith("jaxmotion.")}
  assert {"transforms", "codecs"} <= ours
  assert not ours & {"perfmodel", "planner", "memory", "presets", "testing"}
  # Pallas is loaded when a kernel of it is lowered, and by `jax.extend`.
  assert "jax.numpy" in loaded
  assert not {"jax.experimental.pallas", "jax.extend"} & set(loaded)


def type_checked_names():
  """Names that the package shows type checkers, with the room of each."""
  guard = next(
    node
    for node in parsed(PACKAGE / "__init__.py").body
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
  )
  for node in guard.body:
    yield from ((alias.name, node.module) for alias in node.names)


def test_type_checkers_see_the_names_that_are_loaded_late():
  jaxmotion = importlib.import_module("jaxmotion")
  seen = dict(type_checked_names())
  assert sorted(seen) == jaxmotion.__all__
  assert set(seen) <= set(dir(jaxmotion))
  for name, room in seen.items():
    source = importlib.import_module(room)
    assert getattr(jaxmotion, name) is getattr(source, name)


def test_a_name_that_the_package_lacks_is_an_attribute_error():
  jaxmotion = importlib.import_module("jaxmotion")
  match = "'jaxmotion' has no attribute 'exchnage'"
  with pytest.raises(AttributeError, match=match) as caught:
    _ = jaxmotion.exchnage
  # By these Python finds the nearest name.
  assert (caught.value.name, caught.value.obj) == ("exchnage", jaxmotion)
