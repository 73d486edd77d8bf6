"""Steps of every scheme, run by workers that are processes."""

import functools
import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.paths import ROOT
from tests.processes import WAIT, environment
from tests.transforms import worker


@functools.cache
def run_in_one_process():
  return worker.run(worker.BUILDERS)


def run_in_processes(count, names, module="tests.transforms.worker"):
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  command = [sys.executable, "-m", module]
  processes = [
    subprocess.Popen(
      [*command, str(index), str(count), address, *names],
      cwd=ROOT,
      env=environment(cache=False),
      stdout=subprocess.PIPE,
      text=True,
    )
    for index in range(count)
  ]
  try:
    said = [p.communicate(timeout=WAIT)[0] for p in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  return [json.loads(text.splitlines()[-1]) for text in said]


@pytest.mark.parametrize(
  ("processes", "names"),
  [
    (2, tuple(worker.BUILDERS)),
    # A process for each device, also across the axis of the model. What is
    # delayed is sent by a second thread then, where no model is shared.
    (4, ("wide", "fully_sharded", "delayed", "delayed_wide", "flights")),
  ],
)
def test_processes_compute_what_one_process_computes(processes, names):
  expected = run_in_one_process()
  for found in run_in_processes(processes, names):
    assert tuple(found) == names
    for name, (means, parts) in found.items():
      np.testing.assert_allclose(means, expected[name][0], rtol=1e-6, atol=1e-7)
      # Bit for bit, error memory and moments too.
      assert parts.items() <= expected[name][1].items(), name
