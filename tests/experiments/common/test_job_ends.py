"""How jobs of one process and of several end, and who may join them."""

import os
import signal
import subprocess
import sys

import jax
import pytest

from experiments.common import distributed
from tests.paths import ROOT

WAIT = 60  # Seconds that a slow machine may take.

RUNNER = """
import ctypes, signal, subprocess, sys, time
from experiments.common import shared_flags, signals

def wait_for_child():
  signals.exit_on_sigterm()
  print("ready", flush=True)
  # It shows its process id on the standard output of this process.
  child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
  subprocess.run([sys.executable, "-c", child])

def main():
  if sys.argv[0] == "parent":
    wait_for_child()
  # A shell that runs the tests in the background has it ignored.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signals.end_on_signals()
  print("ready", flush=True)
  if sys.argv[0] == "busy":  # In one long call, as a compilation is.
    ctypes.CDLL(None).sleep(60)
  while True:
    time.sleep(0.01)

sys.argv = sys.argv[1:]
shared_flags.run_main(main)
"""


def start(kind):
  process = subprocess.Popen(
    [sys.executable, "-c", RUNNER, kind],
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )
  assert process.stdout.readline() == "ready\n"
  return process


@pytest.mark.parametrize(
  ("kind", "sent", "name"),
  [("idle", signal.SIGINT, "SIGINT"), ("busy", signal.SIGTERM, "SIGTERM")],
)
def test_a_signal_ends_a_job_with_one_line(kind, sent, name):
  process = start(kind)
  process.send_signal(sent)
  _, said = process.communicate(timeout=WAIT)
  assert said == f"Stopped by {name}.\n"
  assert process.returncode == 128 + sent


def test_sigterm_ends_what_a_job_has_started():
  process = start("parent")
  child = int(process.stdout.readline())
  process.send_signal(signal.SIGTERM)
  _, said = process.communicate(timeout=WAIT)
  assert said == "Stopped by SIGTERM.\n"
  assert process.returncode == 128 + signal.SIGTERM
  with pytest.raises(ProcessLookupError):
    os.kill(child, 0)


def test_jax_does_not_keep_sigterm_from_a_process(monkeypatch):
  given = {}
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda **a: given.update(a)
  )
  monkeypatch.setenv("XLA_FLAGS", "")
  before = jax.config.values["jax_enable_preemption_service"]
  try:
    distributed.initialize(coordinator_address="127.0.0.1:1")
    assert not jax.config.values["jax_enable_preemption_service"]
  finally:
    jax.config.update("jax_enable_preemption_service", before)


@pytest.mark.parametrize(
  ("address", "bound"),
  [
    ("127.0.0.1:5000", "127.0.0.1:5000"),
    ("localhost:5000", None),  # A name: which address is it elsewhere?
    ("203.0.113.1:5000", None),  # Not an address of this host.
  ],
)
def test_the_coordinator_listens_on_its_own_address_alone(
  monkeypatch, address, bound
):
  monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
  arguments = {"coordinator_address": address}
  found = distributed._bind_narrowly(arguments)
  assert found.get("coordinator_bind_address") == bound
  monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "[::]:5000")
  assert distributed._bind_narrowly(arguments) == arguments


def test_every_command_that_can_be_resumed_says_which_signal_ended_it():
  found = {
    path.parent.name: path.read_text()
    for path in (ROOT / "experiments").rglob("__main__.py")
    if "define_workdir()" in path.read_text()
  }
  assert {"study", "train", "weights"} <= set(found)
  ends = "signals.end_on_signals()\n  shared_flags.run_main(main)\n"
  assert [name for name, text in found.items() if ends not in text] == []
