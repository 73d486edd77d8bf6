"""Tests of the flags that several runners define."""

import json
import subprocess
import sys

from experiments.common import shared_flags
from tests.paths import ROOT
from tests.processes import environment

RUNNERS = sorted(
  ".".join(path.relative_to(ROOT).with_suffix("").parts)
  for path in (ROOT / "experiments").rglob("*.py")
  if "shared_flags.run_main(main)" in path.read_text()
)
# What runners share without flags is imported once, for both orders.
IMPORT_ALL = """
import importlib, json, os, sys
from absl import flags
import flax.nnx, jaxmotion, matplotlib.pyplot, optax, rich.table
from experiments.common import list_flags

bad, wrong, free, *names = sys.argv[1:]
BAD, WRONG, FREE = json.loads(bad), json.loads(wrong), json.loads(free)
sys.argv = ["run"]
child = os.fork()
for name in names if child else names[::-1]:
  runner = importlib.import_module(name)
  of_runner = [f.name for f in flags.FLAGS.get_key_flags_for_module(name)]
  assert "json" in of_runner, f"{name} does not show --json in its --help"
  for flag, bad in BAD.items():
    if flag in of_runner:
      try:
        flags.FLAGS(["run", f"--{flag}={bad}"])
      except flags.IllegalFlagValueError as error:
        assert bad in str(error) and "\\n" not in str(error), error
      else:
        raise AssertionError(f"{name} accepts --{flag}={bad}")
      flags.FLAGS[flag].unparse()
  lists = {}
  for flag in flags.FLAGS.get_key_flags_for_module(name):
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
      try:
        flags.FLAGS(["run", f"--{flag_name}={bad}"])
      except flags.IllegalFlagValueError as error:
        text = str(error)
        assert text.startswith(f"flag --{flag_name}={bad}: "), text
        assert " must " in text and "\\n" not in text, text
      else:
        raise AssertionError(f"{name} accepts --{flag_name}={bad}")
      flag.unparse()
train = flags.FLAGS.get_key_flags_for_module("experiments.train.__main__")
shown = {"coordinator_address", "num_processes", "process_id", "distributed"}
assert shown <= {f.name for f in train}, "its --help lacks flags of hosts"
flags.FLAGS(["run", "--json=rows"])
print(flags.FLAGS.json, flush=True)
if child:
  _, status = os.waitpid(child, 0)
  assert status == 0, "runners fail if the last one is imported first"
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
  "experiments.activations.__main__": {"looks": ["5,0", "-1", "0,1"]},
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
    "networks": ["gpt", "gpt:0", "gtp:8"],
    "batch_of": ["resnet50:8"],
    "budgets": ["0,5"],
    "budget_of": ["gpt"],
  },
  "experiments.residuals.compare": {"models": ["gpt:layers"]},
  "experiments.residuals.equality": {"networks": ["gpt"]},
}
# Flags whose items only the work itself can check.
FREE = ["file", "policies"]
# What takes long to import is there before the forks.
RUN_ALL = """
import os, sys
import matplotlib.backends.backend_agg
from ml_collections import config_flags
from experiments.common import files, shared_flags

def main():
  if config.value.steps == 2:
    config.value.step
  files.read_text("/".join(("/nowhere", *config.value.names)))

for line in sys.stdin.read().splitlines():
  sys.argv = ["run", *line.split()]
  child = os.fork()
  if not child:
    os.dup2(1, 2)
    config = shared_flags.define_config("digits")
    shared_flags.define_rows()
    shared_flags.define_plot()
    shared_flags.run_main(main)
  _, status = os.waitpid(child, 0)
  print("exit", os.waitstatus_to_exitcode(status), flush=True)
"""


def run_python(*arguments, text=""):
  return subprocess.run(
    [sys.executable, *arguments],
    input=text,
    check=False,
    capture_output=True,
    cwd=ROOT,
    env=environment(),
    text=True,
  )


def test_a_process_may_import_all_runners_in_either_order():
  assert "experiments.train.__main__" in RUNNERS and len(RUNNERS) >= 15
  tables = map(json.dumps, (REFUSED, WRONG, FREE))
  found = run_python("-c", IMPORT_ALL, *tables, *RUNNERS)
  assert found.returncode == 0, found.stderr[-2000:]
  assert found.stdout.split() == ["rows", "rows"]


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


def test_bad_files_are_refused_in_one_line_before_any_work(tmp_path):
  for name, text in FILES.items():
    (tmp_path / f"{name}.py").write_text(text + "\n")
  lines = [line.replace("{}", str(tmp_path)) for line in ANSWERS]
  lines.append("rows.jsonl")
  found = run_python("-c", RUN_ALL, text="\n".join(lines))
  assert found.returncode == 0, found.stderr[-2000:]
  answers = found.stdout.split("exit 1\n")
  assert len(answers) == len(lines) + 1, found.stdout
  assert "Flags must start with --, got 'rows.jsonl'." in answers[-2]
  for line, wanted, answer in zip(
    ANSWERS, ANSWERS.values(), answers[:-2], strict=True
  ):
    assert wanted in answer, (line, answer)
    told = [one for one in answer.splitlines() if "--helpshort" not in one]
    assert len(told) == 1, (line, answer)
  assert len(list(tmp_path.iterdir())) == len(FILES)


def test_another_process_than_the_first_writes_nothing(monkeypatch):
  monkeypatch.setenv("JAX_PROCESS_ID", "1")
  assert not shared_flags._may_write()
  monkeypatch.setenv("JAX_PROCESS_ID", "0")
  assert shared_flags._may_write()
