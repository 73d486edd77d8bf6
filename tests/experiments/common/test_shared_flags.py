"""Tests of the flags that several runners define."""

import json
import re
import subprocess
import sys

import pytest

from experiments.common import shared_flags
from tests.paths import ROOT
from tests.processes import environment

RUNNERS = sorted(
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for path in (ROOT / "experiments").rglob("*.py")
  if "shared_flags.run_main(main)" in path.read_text()
)
# One process imports what takes long, and forks for each check.
FORK_ALL = """
import importlib, json, os, sys, traceback
import matplotlib.backends.backend_agg
from absl import flags
from ml_collections import config_flags
from experiments.common import files, list_flags, shared_flags
from experiments.common.console import JobError

BAD, WRONG, FREE, NAMES, LINES = json.loads(sys.stdin.read())

def fork(run, *arguments):
  child = os.fork()
  if not child:
    code = 0
    try:
      run(*arguments)
    except SystemExit as end:
      code = end.code
      if isinstance(code, str):
        code = print(code) or 1
    except BaseException:
      code = traceback.print_exc() or 2
    sys.stdout.flush()
    os._exit(code)  # An ordinary exit frees all modules, which takes longer.
  _, status = os.waitpid(child, 0)
  print("exit", os.waitstatus_to_exitcode(status), flush=True)

def main():
  if config.value.steps == 2:
    config.value.step
  if config.value.steps == 3:
    raise JobError("`a` must be b, got 'c'.")
  if config.value.steps == 4:
    raise OSError(28, "No space left on device", "/some/file")
  files.read_text("/".join(("/nowhere", *config.value.names)))

def run_line(line):
  global config
  sys.argv = ["run", *line.split()]
  os.dup2(1, 2)
  config = shared_flags.define_config("digits")
  shared_flags.define_rows()
  shared_flags.define_plot()
  shared_flags.run_main(main)

def refuse(name, flag, bad):
  try:
    flags.FLAGS(["run", f"--{flag.name}={bad}"])
  except flags.IllegalFlagValueError as error:
    flag.unparse()
    return str(error)
  raise AssertionError(f"{name} accepts --{flag.name}={bad}")

def import_all(names):
  for name in names:
    runner = importlib.import_module(name)
    known = {f.name: f for f in flags.FLAGS.get_key_flags_for_module(name)}
    assert "json" in known, f"{name} does not show --json in its --help"
    for flag, bad in BAD.items():
      if flag in known:
        text = refuse(name, known[flag], bad)
        assert bad in text and "\\n" not in text, text
    lists = {}
    for flag in known.values():
      absl_lists = flags.MultiFlag, flags.MultiEnumClassFlag
      assert not isinstance(flag, absl_lists), f"{name} --{flag.name}"
      assert type(flag.parser) is not flags.ListParser, f"{name} --{flag.name}"
      if isinstance(flag.parser, list_flags._ItemsParser):
        lists[flag.name] = flag
    own = WRONG.get(name, {})
    assert set(own) <= set(lists), name
    for flag_name in set(lists) - set(FREE):
      flag = lists[flag_name]
      for bad in ("@", *own.get(flag_name, []), f"{flag.default_unparsed},,"):
        text = refuse(name, flag, bad)
        assert text.startswith(f"flag --{flag_name}={bad}: "), text
        assert " must " in text and "\\n" not in text, text
  train = flags.FLAGS.get_key_flags_for_module("experiments.train.__main__")
  shown = {"coordinator_address", "num_processes", "process_id", "distributed"}
  assert shown <= {f.name for f in train}, "its --help lacks flags of hosts"
  flags.FLAGS(["run", "--json=rows"])
  assert flags.FLAGS.json == "rows"

for line in LINES:
  fork(run_line, line)
import flax.nnx, jaxmotion, matplotlib.pyplot, optax, rich.table
for names in (NAMES, NAMES[::-1]):
  fork(import_all, names)
"""
# Files that cannot be read or written, of flags that runners share.
REFUSED = {
  "json": "/dev/null/rows.jsonl",
  "plot": "plot.unknown",
  "store": "/dev/null/store.jsonl",
  "tensorboard": "/dev/null/board",
  "config": "/nowhere/config.py",
}
# Items that runners must refuse, beside empty ones and "@".
WRONG = {
  "experiments.activations.__main__": {"looks": ["5,3", "-1", "0,1", "0"]},
  "experiments.hosts.__main__": {
    "cases": ["int7", "one_program_none"],
    "widths": ["784", "784,0"],
  },
  "experiments.perfmodel.validate": {
    "known_widths": ["512"],
    "known_batches": ["8,0"],
    "rates": ["1gb"],
    "shapes": ["512", "512x0"],
  },
  "experiments.planner.links": {"networks": ["gpt:8"]},
  "experiments.planner.memory": {
    "models": ["gpt:layer=3"],
    "options": ["exact,round"],
  },
  "experiments.residuals.__main__": {
    "networks": [
      *("gpt", "gpt:", "gpt:x", "gpt:0", "gpt:-8", "gpt:8.5", "gtp:8"),
      *("gpt:8:layer=3", "gpt:8:layers=0", "resnet50:8:image=1"),
    ],
    "batch_of": ["resnet50:8"],
    "budgets": ["0,5"],
    "budget_of": ["gpt"],
  },
  "experiments.residuals.compare": {
    "models": [
      *("rnn9", "gpt:layers", 'gpt:layers="a"', "gpt:layers=NaN"),
      *("mlp_relu:kind=1", "resnet50:image=1"),
    ],
  },
  "experiments.residuals.equality": {"networks": ["gpt"]},
}
# Flags whose items only the work itself can check.
FREE = ["file", "policies"]


# What a command line must be answered with, in a line of its own.
ANSWERS = {
  "--json=/dev/null/rows.jsonl": "'/dev/null' must be a folder",
  "--json=/": "'/' must be a file, and is a folder",
  "--json=/proc/rows.jsonl": "'/proc' must be a folder that files can",
  "--plot=x.unknown": "'x.unknown' must end in .",
  "--plot=x": "'x' must end in .",
  "--plot=/dev/null/x.png": "'/dev/null' must be a folder",
  "--config=/nowhere/x.py": "'/nowhere/x.py' must exist, and does not.",
  "--config=/": "'/' must be a file that can be read",
  "--config={}/none.py": "must have a function get_config that returns a Con",
  "--config={}/other.py": "must have a function get_config that returns a Con",
  "--config={}/syntax.py": "raises SyntaxError: invalid syntax (syntax.py, ",
  "--config={}/lines.py": "raises ValueError at line 3: of two lines",
  "--config={}/imports.py": "raises ModuleNotFoundError at line 1: No module",
  "--config.nothing=3": "`--config.FIELD` must be a field of the configuration",
  "--config={}/good.py --config.nothing=3": "`--config.FIELD` must be a field",
  "--config={}/good.py --config.steps=some": "invalid literal for int()",
  "--config={}/good.py --config.steps=2": (
    "got one without 'step' Did you mean \"steps\" instead"
  ),
  "--config={}/good.py --config.steps=3": "Stopped: `a` must be b, got 'c'.",
  "--config={}/good.py --config.steps=4": (
    "Stopped: No space left on device (/some/file)"
  ),
  # Checks of files leave nothing behind.
  "--config={}/good.py --json={}/new/rows.jsonl --plot={}/x.png": (
    "Stopped: '/nowhere/data' must exist"
  ),
  "--config={}/good.py --config.names=a,b": "Stopped: '/nowhere/a/b' must",
}
FILES = {
  "none": "steps = 3",
  "other": "def get_config():\n  return {}",
  "syntax": "def get_config(:",
  "lines": "\ndef get_config():\n  raise ValueError('of two\\nlines')",
  "imports": "import no_such_package",
  "good": (
    "from ml_collections import ConfigDict\n"
    "def get_config():\n  return ConfigDict({'steps': 1, 'names': ('data',)})"
  ),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
  """Folder of configurations, and what each fork has printed."""
  folder = tmp_path_factory.mktemp("files")
  for name, text in FILES.items():
    (folder / f"{name}.py").write_text(text + "\n")
  lines = [line.replace("{}", str(folder)) for line in ANSWERS]
  lines.append("rows.jsonl")
  done = subprocess.run(
    [sys.executable, "-c", FORK_ALL],
    input=json.dumps([REFUSED, WRONG, FREE, RUNNERS, lines]),
    capture_output=True,
    cwd=ROOT,
    env=environment(),
    text=True,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  *lines, forward, backward, _ = re.split(r"(?<=exit \d\n)", done.stdout)
  return folder, lines, (forward, backward), done.stderr[-2000:]


def test_a_process_may_import_all_runners_in_either_order(answers):
  assert "experiments.train.__main__" in RUNNERS and len(RUNNERS) >= 15
  _, _, orders, errors = answers
  assert orders == ("exit 0\n", "exit 0\n"), errors


def test_bad_files_are_refused_in_one_line_before_any_work(answers):
  folder, (*found, last), *_ = answers
  assert "Flags must start with --, got 'rows.jsonl'." in last
  for line, answer in zip(ANSWERS, found, strict=True):
    assert ANSWERS[line] in answer, (line, answer)
    *told, code = [a for a in answer.splitlines() if "--helpshort" not in a]
    assert len(told) == 1 and code == "exit 1", (line, answer)
  assert len(list(folder.iterdir())) == len(FILES)


def test_another_process_than_the_first_writes_nothing(monkeypatch):
  monkeypatch.setenv("JAX_PROCESS_ID", "1")
  assert not shared_flags._may_write()
  monkeypatch.setenv("JAX_PROCESS_ID", "0")
  assert shared_flags._may_write()
