"""Jobs of several real processes on this machine, and how they end."""

import contextlib
import os
import re
import signal
import subprocess
import time

import jax
import numpy as np
import pytest
from absl.testing import flagsaver
from ml_collections import ConfigDict

from experiments.common import distributed, records
from experiments.common.checkpoint import read_log
from experiments.common.console import JobError
from experiments.fuzz.fault_jobs import find_step
from experiments.hosts.processes import find_free_port
from experiments.train import tasks
from experiments.train.mesh import make_mesh
from experiments.train.trainer import Trainer
from tests import compile_fast
from tests.experiments.jobs import command, save_images
from tests.paths import ROOT
from tests.processes import WAIT, environment

AT_ONCE = 10  # Seconds that a slow machine may take to notice a death.
STALLED = 3  # Seconds that a stalled process is waited for, in these tests.
# Enough steps to be hit between two checkpoints, and two kernels that are large
# enough to be cut between the devices of a process. Every process compiles for
# itself: one convolution is enough.
LONG = {"steps": 120, "checkpoint_every": 60, "channels": (4,), "hidden": 64}
LOST = "another process died, stalled or was cut off"
# The transport's threads report their peers in pieces, which may mix.
GLOO = re.compile(
  r"\[Gloo\] Rank |\d+| is connected to | peer ranks\. |"
  r"Expected number of connected peer ranks is : "
)


@contextlib.contextmanager
def job(config, folder, *flags, cache=True, **variables):
  """Two processes of one job; their output is in `folder`."""
  address = f"127.0.0.1:{find_free_port()}"
  folder.mkdir(exist_ok=True)
  processes = []
  try:
    for index in range(2):
      arguments = [
        *distributed.member_flags(address, 2, index),
        f"--workdir={folder / 'work'}",
      ]
      with (
        (folder / f"out{index}").open("w") as out,
        (folder / f"err{index}").open("w") as err,
      ):
        processes.append(
          subprocess.Popen(
            command(config, *arguments, *flags),
            cwd=ROOT,
            env=environment(cache) | variables,
            stdout=out,
            stderr=err,
          )
        )
    yield processes
  finally:
    for process in processes:
      with contextlib.suppress(ProcessLookupError):
        process.kill()
      process.wait()


def hit_after_checkpoint(processes, folder, sent, step=60):
  """Signals process 1 after a step; returns code, seconds, text of its peer."""
  deadline = time.monotonic() + WAIT
  while find_step(folder / "work") < step:
    said = (folder / "err0").read_text()
    assert all(p.poll() is None for p in processes), said[-2000:]
    assert time.monotonic() < deadline, "no checkpoint in time"
    time.sleep(0.005)
  time.sleep(0.05)  # Into the steps that follow.
  processes[1].send_signal(sent)
  begin = time.monotonic()
  code = processes[0].wait(timeout=WAIT)
  return code, time.monotonic() - begin, (folder / "err0").read_text()


def straight(config, mesh, exchange):
  """The losses of one process that is not interrupted."""
  trainer = Trainer(config, tasks.load_task(config), mesh, exchange)
  return trainer.train_seed(seed=0).log.loss


def hosts_and_devices():
  """What two processes of two devices each are, in this one."""
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  return jax.sharding.Mesh(devices, ("host", "device"))


@pytest.mark.slow
def test_a_killed_process_ends_the_job_at_once_which_then_goes_on(
  tmp_path, tiny
):
  images = save_images(tmp_path / "images.npz")
  fields = LONG | {"checkpoint_every": 30} | images
  config = tiny("digits", exchanges=("int4_feedback",), workers=2, **fields)
  with job(config, tmp_path) as processes:
    code, seconds, said = hit_after_checkpoint(
      processes, tmp_path, signal.SIGKILL
    )
  assert code != 0 and LOST in said
  assert seconds < AT_ONCE, said[-2000:]
  # Of two checkpoints before the kill, one is broken, where process 1 saved.
  run = tmp_path / "work" / "checkpoints" / "int4_feedback-seed0"
  part = max((run / "60" / "state" / "ocdbt.process_1" / "d").iterdir())
  data = bytearray(part.read_bytes())
  data[len(data) // 2] ^= 1
  part.write_bytes(data)
  times = read_log(run / "30").step_ms

  rows = tmp_path / "rows.jsonl"
  with job(config, tmp_path, f"--json={rows}") as processes:
    codes = [process.wait(timeout=WAIT) for process in processes]
  said = (tmp_path / "err0").read_text()
  assert codes == [0, 0], said[-2000:]
  broken, resumed = said.splitlines()
  assert f"{part.relative_to(run / '60')} does not match" in broken
  assert resumed == "int4_feedback-seed0: resumed from step 30."
  log = read_log(run / "120")
  assert log.loss == straight(config, make_mesh(2), "int4_feedback")
  assert log.step_ms[:30] == times  # Those steps were not done again.
  (row,) = (r for r in records.read_rows(rows) if r.metric == "loss")
  assert row.value == log.loss[-1]
  assert "2 x cpu cpu, 2 processes" in row.machine
  # Only the first process prints.
  assert "computed from the bytes" in (tmp_path / "out0").read_text()
  assert GLOO.sub("", (tmp_path / "out1").read_text()).split() == []


@pytest.mark.slow
def test_a_stalled_process_ends_the_job_in_the_time_it_is_given(tmp_path, tiny):
  images = save_images(tmp_path / "images.npz")
  config = tiny("digits", exchanges=("fp32",), **LONG, **images)
  limit = f"{distributed._COLLECTIVE_FLAG}={STALLED}"
  flags = f"{limit} {compile_fast.flags()}"
  # No cache: one process that compiles alone would look like a stalled one.
  with job(config, tmp_path, cache=False, XLA_FLAGS=flags) as processes:
    code, seconds, said = hit_after_checkpoint(
      processes, tmp_path, signal.SIGSTOP
    )
  assert code == 1
  assert STALLED - 1 < seconds < STALLED + AT_ONCE
  assert f"Process 0 of 2 ended: {LOST}" in said.splitlines()[-1]


def test_two_processes_of_two_devices_train_as_four_workers_do(tiny):
  config = tiny("digits", workers=4, steps=2, hidden=64, channels=(4,))
  task = tasks.load_task(config)
  sent = {}
  for name in ("fp32", "int8"):
    trainer = Trainer(config, task, hosts_and_devices(), name)
    trained = trainer.train_seed(seed=0)
    program = trainer.program
    # Bytes within a host are not those between hosts.
    assert program.wire_bytes == program.compiled_bytes
    sent[name] = program.wire_bytes
    if name == "fp32":
      flat = straight(config, make_mesh(4), "fp32")
      # The same sums in another order.
      np.testing.assert_allclose(trained.log.loss, flat, rtol=1e-5)
  assert sent["fp32"] > 3 * sent["int8"]


@pytest.fixture
def flags(monkeypatch):
  """Sets flags; the environment names no job until a test does."""
  for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"):
    monkeypatch.delenv(f"JAX_{name}", raising=False)
  monkeypatch.setenv("XLA_FLAGS", "--some_flag=1")
  values = distributed.flags.FLAGS
  with flagsaver.flagsaver():
    yield lambda **given: [
      setattr(values, name, value) for name, value in given.items()
    ]


@pytest.fixture
def started(monkeypatch):
  """What `jax.distributed.initialize` is called with, instead of its work."""
  calls = []
  monkeypatch.setattr(
    jax.distributed, "initialize", lambda **given: calls.append(given)
  )
  monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
  monkeypatch.setattr(distributed, "_read_membership", lambda: (2, 1))
  return calls


def test_a_process_alone_is_left_alone(flags, started):
  with distributed.join_job() as count:
    assert count == 1
  assert started == []
  assert os.environ["XLA_FLAGS"] == "--some_flag=1"
  with pytest.raises(KeyError), distributed.join_job():
    raise KeyError


ENVIRONMENT = {"COORDINATOR_ADDRESS": "a:1", "NUM_PROCESSES": 2}
ENVIRONMENT |= {"PROCESS_ID": 1}
OWN_LIMIT = f"{distributed._COLLECTIVE_FLAG}=7"


@pytest.mark.parametrize(
  ("source", "limit", "kept"),
  [
    ("flags", "--some_flag=1", f"{distributed._COLLECTIVE_FLAG}=30"),
    ("environment", OWN_LIMIT, ""),
  ],
)
def test_arguments_come_from_flags_or_the_environment(
  flags, started, monkeypatch, source, limit, kept
):
  monkeypatch.setenv("XLA_FLAGS", limit)
  for name, value in ENVIRONMENT.items():
    if source == "flags":
      flags(**{name.lower(): value})
    else:
      monkeypatch.setenv(f"JAX_{name}", str(value))
  with distributed.join_job() as count:
    assert count == 2
  (given,) = started
  assert given["coordinator_address"] == "a:1"
  assert (given["num_processes"], given["process_id"]) == (2, 1)
  assert given["heartbeat_timeout_seconds"] == 80
  assert os.environ["XLA_FLAGS"] == f"{limit} {kept}".strip()


def test_the_cluster_is_asked_for_what_is_not_given(flags, started):
  flags(distributed=True, coordinator_address="a:1")
  with distributed.join_job() as count:
    assert count == 2
  (given,) = started
  assert given["coordinator_address"] == "a:1"
  assert "num_processes" not in given
  assert "cluster_detection_method" not in given


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (dict(num_processes=2), "`--coordinator_address` and `--process_id` must"),
    (
      dict(coordinator_address="a:1", num_processes=2, process_id=2),
      "`--process_id` must be at least 0 and less than.* = 2, got 2",
    ),
  ],
)
def test_arguments_that_do_not_fit_are_named(flags, started, given, message):
  flags(**given)
  with pytest.raises(JobError, match=message), distributed.join_job():
    pass


def test_a_number_in_the_environment_is_checked(flags, started, monkeypatch):
  monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
  with pytest.raises(JobError, match="`JAX_NUM_PROCESSES` .* got 'two'"):
    with distributed.join_job():
      pass


def read_missing_field():
  try:
    return ConfigDict({"steps": 1}).lock().seeds
  except AttributeError as error:
    return error


@pytest.mark.parametrize(
  ("error", "line"),
  [
    (
      jax.errors.JaxRuntimeError("Gloo all-reduce failed:\nreset by peer"),
      f"{LOST} (JaxRuntimeError: Gloo all-reduce failed: reset by peer)",
    ),
    (
      SystemExit("Stopped: loss must be finite"),
      "Stopped: loss must be finite",
    ),
    (ValueError("`a` must be b."), "ValueError: `a` must be b."),
    (
      read_missing_field(),
      "`--config` must name a configuration with every field that this runner"
      " reads, got one without 'seeds'. A file of `configs` shows all fields.",
    ),
    (
      ValueError("Gloo context initialization failed: timed out"),
      f"{LOST} (ValueError: Gloo context initialization failed: timed out)",
    ),
    (JobError("`a` must be b, got 'c'."), "`a` must be b, got 'c'."),
    (OSError(28, "No space left"), "No space left"),
  ],
)
def test_an_error_ends_the_process_with_one_line(
  flags, started, monkeypatch, capsys, error, line
):
  class Ended(BaseException):
    pass

  def end(code):
    assert code == 1
    raise Ended

  monkeypatch.setattr(os, "_exit", end)
  flags(coordinator_address="a:1", num_processes=2, process_id=1)
  with pytest.raises(Ended), distributed.join_job():
    raise error
  said = capsys.readouterr().err.splitlines()
  assert said[-1] == f"Process 1 of 2 ended: {line}"
  has_traceback = str(error) == "`a` must be b."
  assert (len(said) > 1) == has_traceback


@pytest.mark.parametrize(
  ("workers", "message"),
  [
    (3, "multiple of the 2 processes, got 3"),
    (2, "got 1 a process for 0"),  # Too few devices in a process.
  ],
)
def test_workers_that_processes_do_not_have_are_named(workers, message):
  with pytest.raises(JobError, match=message):
    make_mesh(workers, processes=2)
