import json
import os
import signal
import subprocess
import sys
import time

import pytest

from experiments.hosts import jax_worker
from experiments.hosts.links import loopback_hosts
from experiments.hosts.processes import HostError, HostGroup
from tests.processes import environment

TINY = ["--widths=8,16,4", "--batch=4"]
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


def test_every_case_runs_and_all_hosts_answer(group):
  for case in ("none", "fp32", "int8", "sign_feedback"):
    first, second = group.ask({"do": "prepare", "case": case})
    assert first["ok"] and second["ok"]
    assert first["predicted_bytes"] == second["predicted_bytes"]
    assert (first["predicted_bytes"] > 0) == (case != "none")
    for reply in group.ask({"do": "run", "case": case, "steps": 3}):
      assert len(reply["step_ms"]) == 3 and reply["loss"] > 0


def test_a_delayed_exchange_runs(group):
  reply, _ = group.ask({"do": "prepare", "case": "delayed_int8"})
  assert reply["predicted_bytes"] > 0
  for reply in group.ask({"do": "run", "case": "delayed_int8", "steps": 2}):
    assert len(reply["step_ms"]) == 2 and reply["loss"] > 0


@pytest.mark.slow
def test_steps_between_two_exchanges_are_timed_together(group):
  for case in ("diloco8_int4", "streaming8_int4"):
    reply, _ = group.ask({"do": "prepare", "case": case})
    assert reply["period"] == 8 and reply["predicted_bytes"] > 0
    for reply in group.ask({"do": "run", "case": case, "steps": 10}):
      assert len(reply["step_ms"]) == 2 and reply["loss"] > 0


def test_bytes_are_those_after_the_start_of_a_preset(group):
  sent = {
    case: group.ask({"do": "prepare", "case": case})[0]["predicted_bytes"]
    for case in ("fp32", "onebit_adam")
  }
  assert 0 < sent["onebit_adam"] < sent["fp32"]


def test_counted_bytes_are_those_of_the_ledger(group):
  # What loopback has sent is that of both hosts, so half of it.
  from experiments.hosts.links import HEADER_BYTES

  reply, _ = group.ask({"do": "prepare", "case": "fp32"})
  found, _ = group.ask({"do": "run", "case": "fp32", "steps": 50})
  payload = (found["bytes"] - HEADER_BYTES * found["packets"]) / 2
  # Arrays this small are mostly the notes that go with every message.
  assert payload > reply["predicted_bytes"]


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
  program = [sys.executable, "-m", jax_worker.__name__, *TINY]
  place = ["--coordinator=127.0.0.1:1", "--rank=1", "--hosts=2"]
  process = subprocess.Popen(
    [*program, *place, "--interface=lo"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
  )
  process.communicate(timeout=NOTICED_S)
  assert process.returncode != 0


def test_silence_is_an_error(group):
  with pytest.raises(HostError, match="did not answer within 0 s"):
    group.processes[0].receive(0.01)


def test_replies_are_all_that_reaches_standard_output(group):
  # XLA and gloo print; a line of theirs would not parse.
  replies = group.ask({"do": "prepare", "case": "none"})
  assert json.loads(json.dumps(replies)) == replies
