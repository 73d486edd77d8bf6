"""Workers that are processes, as unequal ones are."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.hetero import worker
from tests.transforms.test_processes import run_in_processes


@functools.cache
def run_here():
  """Runs two devices of one process, which knows all times."""
  mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
  return worker.run(mesh, lambda n: worker.UNIT_S * n, lambda a: a)


def test_shares_follow_the_speeds_and_all_examples_are_used():
  counts, losses, _ = run_here()
  assert counts == [(6, 2)] * 4
  assert losses[0] == pytest.approx(1) and losses[-1] < losses[0]


@pytest.mark.slow
def test_processes_agree_on_the_shares_from_their_own_times():
  first, second = run_in_processes(2, (), "tests.hetero.worker")
  assert first == second
  assert first[0] == [[6, 2]] * 4
  _, losses, params = run_here()
  np.testing.assert_allclose(first[1], losses, rtol=1e-5)
  np.testing.assert_allclose(first[2], params, atol=1e-5)
