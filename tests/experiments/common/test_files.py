"""Tests of files that are read: what a file may do, and what a message says."""

import ast
import pickle
import zipfile

import numpy as np
import pytest

from experiments.common import files
from experiments.data import image_files
from tests.paths import ROOT

UNPICKLERS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# Calls that run what a file says, or write where a file says.
RUNNING = {"exec", "execfile", "load_module", "extract", "extractall"}
# Files whose readers run them, and say so.
CONFIGURED = {"experiments/common/shared_flags.py"}


def used_names(tree):
  """Names of modules imported and functions called anywhere in a module."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name.split(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      yield node.module.split(".")[0]
    elif isinstance(node, ast.Call):
      yield getattr(node.func, "id", getattr(node.func, "attr", ""))
      for keyword in node.keywords:
        if keyword.arg == "allow_pickle":
          assert ast.unparse(keyword.value) == "False"


def test_no_file_that_is_read_is_run_or_unpacked():
  for folder in ("jaxmotion", "experiments"):
    for path in (ROOT / folder).rglob("*.py"):
      name = str(path.relative_to(ROOT))
      found = set(used_names(ast.parse(path.read_text())))
      assert not found & UNPICKLERS, name
      assert not found & RUNNING or name in CONFIGURED, name


class Bomb:
  def __reduce__(self):
    return (exec, ("raise SystemExit('a file was run')",))


def test_a_pickle_in_place_of_an_archive_or_an_array_is_not_run(tmp_path):
  path = tmp_path / "cifar.npz"
  path.write_bytes(pickle.dumps(Bomb()))
  with pytest.raises(files.FileError, match="must be an .npz archive"):
    image_files.load_cifar10(path)
  bombs = np.empty(1, object)
  bombs[0] = Bomb()
  with pytest.raises(SystemExit):
    pickle.loads(pickle.dumps(bombs))
  np.savez(path, **dict.fromkeys(("x_train", "y_train", "x_test"), bombs))
  with zipfile.ZipFile(path, "a") as archive:
    archive.writestr("../../outside", "text")
    archive.writestr("y_test.npy", b"")
  with pytest.raises(files.FileError, match="must be an .npz archive.*pickle"):
    image_files.load_cifar10(path)
  assert [p.name for p in tmp_path.iterdir()] == ["cifar.npz"]
