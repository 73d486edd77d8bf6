import signal
import subprocess
import time

import jax
import numpy as np
import pytest

from experiments.common import records
from experiments.fuzz.fault_jobs import find_step
from experiments.train import tasks
from experiments.train.mesh import make_mesh
from experiments.train.run import open_workdir, run_experiment
from experiments.train.trainer import Trainer, make_score
from tests.experiments.jobs import command, run, save_images
from tests.paths import ROOT
from tests.processes import WAIT, environment


def test_job_prints_a_table_and_writes_rows_and_a_plot(tmp_path, tiny):
  images = save_images(tmp_path / "images.npz")
  config = tiny("digits", exchanges=("fp32", "int8"), **images)
  json, plot = tmp_path / "rows.jsonl", tmp_path / "plot.png"
  done = run(config, f"--json={json}", f"--plot={plot}")
  assert done.returncode == 0, done.stderr
  assert "computed from the bytes" in done.stdout
  assert "\x1b[" not in done.stdout
  rows = records.read_rows(json)
  assert {row.case for row in rows} == {"fp32", "int8"}
  metrics = {row.metric for row in rows}
  assert metrics >= {"test_accuracy", "wire_bytes_predicted", "step_ms"}
  assert all("2 x cpu" in row.machine for row in rows)
  assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_is_not_finite_ends_the_job_with_a_message(tiny):
  config = tiny("digits", exchanges=("fp32",), learning_rate=1e30)
  with pytest.raises(SystemExit, match=r"Stopped: loss must be finite, got"):
    run_experiment(config)


@pytest.mark.slow
def test_killed_job_goes_on_bit_for_bit(tmp_path, tiny):
  images = save_images(tmp_path / "images.npz")
  config = tiny("digits", exchanges=("sign_feedback",), steps=16, **images)
  killed = tmp_path / "killed"
  kill_after_checkpoint(config, killed, step=3)
  assert open_workdir(killed, config).read_runs() == []
  # Saving is slow, and the next runs are not killed.
  config.checkpoint_every = config.steps

  again = run(config, f"--workdir={killed}")
  assert again.returncode == 0, again.stderr
  task = tasks.load_task(config)
  mesh = make_mesh(config.workers)
  trainer = Trainer(config, task, mesh, "sign_feedback")
  straight = trainer.train_seed(seed=0)
  workdir = open_workdir(killed, config)
  store = workdir.open_store("sign_feedback", 0)
  resumed = trainer.train_seed(
    seed=0, store=store
  )  # Reads the last checkpoint.

  assert resumed.log.loss == straight.log.loss
  pairs = zip(
    jax.tree.leaves(resumed.state),
    jax.tree.leaves(straight.state),
    strict=True,
  )
  assert all(
    np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
  )
  (finished,) = workdir.read_runs()
  expected = trainer.summarize_run(0, straight, make_score(task))
  timed = {"step_ms": 0, "compile_s": 0}
  assert finished._replace(**timed) == expected._replace(**timed)


def kill_after_checkpoint(config, folder, step):
  """Starts a job and kills it once the checkpoint of `step` is there."""
  process = subprocess.Popen(
    command(config, f"--workdir={folder}"),
    cwd=ROOT,
    env=environment(),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )
  deadline = time.monotonic() + WAIT
  try:
    while find_step(folder) < step:
      assert process.poll() is None, "the job ended before it was killed"
      assert time.monotonic() < deadline, "no checkpoint in time"
      time.sleep(0.005)
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
  assert process.returncode == -signal.SIGKILL
