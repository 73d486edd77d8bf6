import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxmotion.hosts import StepsInFlight

ROOT = pathlib.Path(__file__).parents[2]
PAIR = Mesh(np.array(jax.devices()[:2]), ("data",))


@pytest.mark.slow
def test_a_loop_that_never_waits_ends_on_emulated_devices():
  done = subprocess.run(
    [sys.executable, "-m", "tests.loop_without_waiting"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]


def run_behind_a_gate(mesh, steps):
  """Returns how many results are ready when a further step may start."""
  in_flight, results = StepsInFlight(mesh), []
  slow = jax.jit(lambda x: jnp.linalg.svd(x)[1].sum())
  for _ in range(steps):
    in_flight.wait(())
    results.append(slow(jnp.ones((64, 64))))
    in_flight.add((results[-1], "not an array of a step"))
  in_flight.wait(())
  return sum(r.is_ready() for r in results)


def test_all_but_the_last_few_steps_are_done():
  assert run_behind_a_gate(PAIR, 6) >= 3


def test_results_that_the_caller_deleted_do_not_matter():
  in_flight = StepsInFlight(PAIR)
  for _ in range(9):
    args = jnp.ones(2)
    in_flight.wait(args)
    result = jnp.ones(2)
    in_flight.add(result)
    result.delete()
  assert args.is_ready()


def test_a_traced_step_is_not_waited_for():
  in_flight = StepsInFlight(PAIR)

  @jax.jit
  def many_steps(x):
    for _ in range(9):
      in_flight.wait(x)
      x = x + 1
      in_flight.add(x)
    return x

  assert float(many_steps(1.0)) == 10
  in_flight.wait(())


def test_a_step_without_results_is_allowed():
  for results in ((), {}, None):
    StepsInFlight(PAIR).add(results)
