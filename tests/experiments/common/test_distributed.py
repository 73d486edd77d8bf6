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
LONG = {
  "steps": 120,
  "checkpoint_every": 60,
  "channels": (4,),
  "hidden": 64,
}
LOST = "another process died, stalled or was cut off"
ABORTED = "the JAX distributed service detected fatal errors"
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


def hit_after_checkpoint(processes, folder, victim, sent, step=60):
  """Signals a process after the checkpoint of a step; returns its peer's end.

  Returns:
    Its exit code, the seconds it took and what it said.
  """
  deadline = time.monotonic() + WAIT
  while find_step(folder / "work") < step:
    said = (folder / "err0").read_text()
    assert all(p.poll() is None for p in processes), said[-2000:]
    assert time.monotonic() < deadline, "no checkpoint in time"
    time.sleep(0.005)
  time.sleep(0.05)  # Into the steps that follow.
  processes[victim].send_signal(sent)
  begin = time.monotonic()
  other = 1 - victim
  code = processes[other].wait(timeout=WAIT)
  seconds = time.monotonic() - begin
  print(f"exit code {code} after {seconds:.2f} s")
  return code, seconds, (folder / f"err{other}").read_text()


def log_of(folder, exchange, step):
  """Losses and times of the steps before a checkpoint."""
  path = folder / "work" / "checkpoints" / f"{exchange}-seed0" / str(step)
  return read_log(path)


def flip_part(folder, exchange):
  """Flips a bit that process 1 has saved; returns the line that tells of it."""
  path = folder / "work" / "checkpoints" / f"{exchange}-seed0" / "60"
  part = max(path.glob("state/ocdbt.process_1/d/*"))
  data = bytearray(part.read_bytes())
  data[len(data) // 2] ^= 1
  part.write_bytes(data)
  return (
    f"Checkpoint {path} is broken: {part.relative_to(path)} does not match its"
    " checksum. The run goes on from step 30."
  )


def straight(config, mesh, exchange):
  """The losses of one process that is not interrupted."""
  trainer = Trainer(config, tasks.load_task(config), mesh, exchange)
  return trainer.train_seed(seed=0).log.loss


def hosts_and_devices():
  """What two processes of two devices each are, in this one."""
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  return jax.sharding.Mesh(devices, ("host", "device"))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("workers", "victim", "exchange"),
  [(2, 1, "sign_feedback"), (4, 0, "int4_feedback")],
)
def test_a_killed_process_ends_the_job_which_then_goes_on_bit_for_bit(
  tmp_path, tiny, workers, victim, exchange
):
  images = save_images(tmp_path / "images.npz")
  config = tiny(
    "digits", exchanges=(exchange,), workers=workers, **LONG, **images
  )
  # With two checkpoints before the kill, one of them may be broken.
  config.checkpoint_every = 60 if workers == 2 else 30
  with job(config, tmp_path) as processes:
    code, seconds, said = hit_after_checkpoint(
      processes, tmp_path, victim, signal.SIGKILL
    )
  assert code != 0
  assert seconds < AT_ONCE, said[-2000:]
  # JAX may end what loses its coordinator before this program can.
  assert LOST in said or (victim == 0 and ABORTED in said)
  assert find_step(tmp_path / "work") == 60
  kept, notices = 60, []
  if workers == 4:
    kept, notices = 30, [flip_part(tmp_path, exchange)]
  notices.append(f"{exchange}-seed0: resumed from step {kept}.")
  _, times = log_of(tmp_path, exchange, kept)

  rows = tmp_path / "rows.jsonl"
  with job(config, tmp_path, f"--json={rows}") as processes:
    codes = [process.wait(timeout=WAIT) for process in processes]
  said = (tmp_path / "err0").read_text()
  assert codes == [0, 0], said[-2000:]
  assert said.splitlines() == notices
  mesh = make_mesh(2) if workers == 2 else hosts_and_devices()
  expected = straight(config, mesh, exchange)
  seen, all_times = log_of(tmp_path, exchange, 120)
  if workers == 2:
    assert seen == expected
  else:
    # Four losses are averaged, in an order that is the transport's own.
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
  assert all_times[:kept] == times  # Those steps were not done again.
  (row,) = (r for r in records.read_rows(rows) if r.metric == "loss")
  assert row.value == seen[-1]
  assert f"{workers} x cpu cpu, 2 processes" in row.machine
  # Only the first process prints.
  assert "computed from the bytes" in (tmp_path / "out0").read_text()
  said = (tmp_path / "out1").read_text()
  assert GLOO.sub("", said).split() == []


@pytest.mark.slow
def test_a_stalled_process_ends_the_job_in_the_time_it_is_given(tmp_path, tiny):
  images = save_images(tmp_path / "images.npz")
  config = tiny("digits", exchanges=("fp32",), **LONG, **images)
  limit = f"{distributed._COLLECTIVE_FLAG}={STALLED}"
  flags = f"{limit} {compile_fast.flags()}"
  # No cache: one process that compiles alone would look like a stalled one.
  with job(config, tmp_path, cache=False, XLA_FLAGS=flags) as processes:
    code, seconds, said = hit_after_checkpoint(
      processes, tmp_path, 1, signal.SIGSTOP
    )
  assert code == 1
  assert STALLED - 1 < seconds < STALLED + AT_ONCE
  assert f"Process 0 of 2 ended: {LOST}" in said.splitlines()[-1]


def test_two_processes_of_two_devices_train_as_four_workers_do(tiny):
  config = tiny("digits", workers=4, steps=6, hidden=64)
  ours = straight(config, hosts_and_devices(), "fp32")
  flat = straight(config, make_mesh(4), "fp32")
  # The same sums in another order.
  np.testing.assert_allclose(ours, flat, rtol=1e-5)


def test_bytes_within_a_host_are_not_those_between_hosts(tiny):
  config = tiny("digits", workers=4, steps=6, hidden=64)
  task = tasks.load_task(config)
  sent = {}
  for name in ("fp32", "int8"):
    trainer = Trainer(config, task, hosts_and_devices(), name)
    trainer.train_seed(seed=0, stop=0)
    program = trainer.program
    assert program.wire_bytes == program.compiled_bytes
    sent[name] = program.wire_bytes
  assert sent["fp32"] > 3 * sent["int8"]


@pytest.fixture
def flags(monkeypatch):
  """Sets flags; the environment names no job until a test does."""
  for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"):
    monkeypatch.delenv(f"JAX_{name}", raising=False)
  monkeypatch.setenv("XLA_FLAGS", "--some_flag=1")
  values = distributed.flags.FLAGS
  if not values.is_parsed():
    values.mark_as_parsed()
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


@pytest.mark.parametrize("source", ["flags", "environment"])
def test_arguments_come_from_flags_or_the_environment(
  flags, started, monkeypatch, source
):
  if source == "flags":
    flags(coordinator_address="a:1", num_processes=2, process_id=1)
  else:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
  with distributed.join_job() as count:
    assert count == 2
  (given,) = started
  assert given["coordinator_address"] == "a:1"
  assert (given["num_processes"], given["process_id"]) == (2, 1)
  assert given["heartbeat_timeout_seconds"] == 80
  limit = f"{distributed._COLLECTIVE_FLAG}=30"
  assert os.environ["XLA_FLAGS"] == f"--some_flag=1 {limit}"


def test_a_limit_of_the_users_own_is_kept(flags, started, monkeypatch):
  own = f"{distributed._COLLECTIVE_FLAG}=7"
  monkeypatch.setenv("XLA_FLAGS", own)
  flags(coordinator_address="a:1", num_processes=2, process_id=1)
  with distributed.join_job():
    assert os.environ["XLA_FLAGS"] == own


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


def test_processes_must_divide_the_workers():
  with pytest.raises(JobError, match="multiple of the 2 processes, got 3"):
    make_mesh(3, processes=2)


def test_too_few_devices_in_a_process_are_named():
  with pytest.raises(JobError, match="got 1 a process for 0"):
    make_mesh(2, processes=2)
