"""Workers that are processes, as unequal ones are."""

import jax
import numpy as np
from jax.sharding import Mesh

from tests.hetero import worker
from tests.transforms.test_processes import run_in_processes


def test_processes_agree_on_the_shares_from_their_own_times():
  first, second = run_in_processes(2, (), "tests.hetero.worker")
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
