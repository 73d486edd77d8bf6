"""Workers that are processes, as unequal ones are."""

import json
import socket
import subprocess
import sys

import jax
import numpy as np
from jax.sharding import Mesh

from tests.experiments.jobs import environment
from tests.hetero import worker
from tests.paths import ROOT

WAIT_S = 120


def test_processes_agree_on_the_shares_from_their_own_times():
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{probe.getsockname()[1]}"
  processes = [
    subprocess.Popen(
      [sys.executable, "-m", "tests.hetero.worker", str(index), address],
      cwd=ROOT,
      env=environment(cache=False),
      stdout=subprocess.PIPE,
      text=True,
    )
    for index in range(2)
  ]
  try:
    said = [p.communicate(timeout=WAIT_S)[0] for p in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  first, second = (json.loads(text.splitlines()[-1]) for text in said)
  assert first == second
  assert first[0] == [[6, 2]] * 4
  # The same as two devices of one process, which knows all times.
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  counts, losses, params = worker.run(
    mesh, lambda n: worker.UNIT_S * n, lambda a: a
  )
  assert counts == [(6, 2)] * 4
  np.testing.assert_allclose(first[1], losses, rtol=1e-5)
  np.testing.assert_allclose(first[2], params, atol=1e-5)
