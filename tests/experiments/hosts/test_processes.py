import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest
from absl.testing import flagsaver

from experiments.common.console import JobError
from experiments.hosts import (
  __main__ as hosts_main,
  jax_worker,
  run as hosts_run,
)
from experiments.hosts.links import loopback_hosts
from experiments.hosts.processes import HostError, HostGroup
from tests.paths import ROOT
from tests.processes import environment

TINY = ["--widths=64,32,10", "--batch=4"]
# A host that is killed is noticed at once by a collective; this is generous.
NOTICED_S = 30


@pytest.fixture(autouse=True, scope="module")
def shared_programs():
  """Lets the hosts of these tests share compiled programs."""
  with pytest.MonkeyPatch.context() as patch:
    for name, value in environment().items():
      patch.setenv(name, value)
    yield


@pytest.fixture(scope="module")
def group(shared_programs):
  with HostGroup(loopback_hosts(2), jax_worker.__name__, TINY) as group:
    yield group


def test_every_case_runs_and_the_command_tells_what_hosts_answer(
  group, monkeypatch, run_main
):
  given, said = [], []

  class Group(contextlib.nullcontext):
    def __init__(self, hosts, module, arguments):
      given.append((len(hosts), module, arguments))
      super().__init__(self)

    def ask(self, command):
      said.append(group.ask(command))
      return said[-1]

  monkeypatch.setattr(hosts_run, "HostGroup", Group)
  monkeypatch.setattr(hosts_main.signals, "exit_on_sigterm", lambda: None)
  cases = ["none", "fp32", "sign_feedback", "onebit_adam"]
  chosen = {"rate": "loopback", "optimizer": "adamw", "peers": []}
  chosen |= {"widths": [64, 9], "batch": 4, "steps": 3, "rounds": 2}
  rows, printed = run_main(hosts_main.main, plot=True, cases=cases, **chosen)
  arguments = ["--widths=64,9", "--batch=4", "--optimizer=adamw"]
  assert given == [(2, jax_worker.__name__, arguments)]
  for first, second in said:
    assert first["case"] == second["case"]
    if "step_ms" not in first:
      assert first["ok"] and first == second | {"compile_s": first["compile_s"]}
      continue
    for reply in (first, second):
      # The preset's own rate fits four examples within a few steps.
      assert reply["loss"] > 0 or reply["case"] == "onebit_adam"
      assert len(reply["step_ms"]) == 3

  assert {row.experiment for row in rows} == {"hosts_2_loopback_adamw"}
  values = {(row.case, row.metric): row.value for row in rows}
  none, *sent = (values[case, "wire_bytes_predicted"] for case in cases)
  # Bytes of a preset are those after its start.
  assert none == 0 and sent[0] > 10 * sent[1] > 0 and 0 < sent[2] < sent[0]
  # The loopback interface sends for both hosts, and for other programs.
  for case, predicted in zip(cases[1:3], sent, strict=False):
    assert values[case, "wire_bytes_counted"] > predicted
  assert "what the link allows" in printed


def test_what_cannot_be_measured_is_said(tmp_path, monkeypatch, capsys):
  with flagsaver.flagsaver(cases=[], peers=[]):
    with pytest.raises(JobError, match="`--cases` or `--peers` must name a"):
      hosts_main.main()
  monkeypatch.setenv("PATH", str(tmp_path))
  hosts_main.main()
  said = capsys.readouterr().out
  assert "Not measured" in said and "not installed" in said


@pytest.mark.slow
def test_steps_between_two_exchanges_are_timed_together(group):
  for case in ("diloco8_int4", "streaming8_int4"):
    reply, _ = group.ask({"do": "prepare", "case": case})
    assert reply["period"] == 8 and reply["predicted_bytes"] > 0
    for reply in group.ask({"do": "run", "case": case, "steps": 10}):
      assert len(reply["step_ms"]) == 2 and reply["loss"] > 0


@pytest.mark.slow
def test_an_unknown_case_ends_the_hosts_with_what_was_wrong():
  with pytest.raises(HostError, match=r"host \d .*got 'int7'"):
    with HostGroup(loopback_hosts(2), jax_worker.__name__, TINY) as group:
      group.ask({"do": "prepare", "case": "int7"})


@pytest.mark.slow
@pytest.mark.parametrize(
  ("victim", "case"), [(0, "fp32"), (1, "streaming8_int4")]
)
def test_a_host_that_is_killed_ends_the_others_with_an_error(victim, case):
  # Large enough for sums of two queues on the link.
  wide = ["--widths=8,256,256,256,4", *TINY[1:]]
  with HostGroup(loopback_hosts(2), jax_worker.__name__, wide) as group:
    group.ask({"do": "prepare", "case": case})
    for process in group.processes:
      process.send({"do": "run", "case": case, "steps": 10**7})
    time.sleep(0.5)
    os.kill(group.processes[victim].pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(HostError, match=r"host \d"):
      group.processes[1 - victim].receive(NOTICED_S)
    assert time.monotonic() - begin < NOTICED_S


def test_a_host_ends_with_its_input():
  connect = (
    "import time; from experiments.hosts import worker\n"
    "worker.converse_with_parent(lambda: time.sleep(100), print)"
  )
  process = subprocess.Popen(
    [sys.executable, "-c", connect], cwd=ROOT, stdin=subprocess.PIPE
  )
  process.communicate(timeout=NOTICED_S)
  assert process.returncode == 1


def test_silence_is_an_error(group):
  with pytest.raises(HostError, match="did not answer within 0 s"):
    group.processes[0].receive(0.01)
