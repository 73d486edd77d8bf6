"""The second thread, which sends, and the steps in flight."""

import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.hosts import Sender, StepsInFlight
from tests.meshes import mesh_of

SENDER = Sender(mesh_of(1))
ADD_ONE = jax.jit(lambda x: x + 1)


@jax.jit
def run_long(x, turns):
  """Multiplies matrices, as XLA:CPU runs cheaper programs at once."""
  return jax.lax.fori_loop(0, turns, lambda i, x: jnp.tanh(x @ x), x)


# Each array is asked once. Asked before it is computed, `is_ready` makes a
# future, which another thread sets: asked again, it says no for up to 0.1 ms
# after the array is computed.
def test_what_is_sent_next_follows_what_was_sent():
  x = jnp.ones((256, 256))
  # Nothing is compiled while the long program runs.
  jax.block_until_ready((run_long(ADD_ONE(x), 1), SENDER.send(ADD_ONE, x)))
  sent = SENDER.send(run_long, x, 200)
  again = SENDER.send(ADD_ONE, x)
  again.block_until_ready()
  assert sent.is_ready()


def test_what_is_sent_follows_all_that_the_caller_had_dispatched():
  x = jnp.ones((256, 256))
  before = run_long(x, 100)
  sent = SENDER.send(ADD_ONE, x)
  sent.block_until_ready()
  assert before.is_ready()


def test_errors_of_a_program_are_the_callers():
  def fail(x):
    raise ValueError("`x` must be otherwise.")

  with pytest.raises(ValueError, match="`x` must be otherwise"):
    SENDER.send(jax.jit(fail), np.float32(1))
  assert float(SENDER.send(ADD_ONE, np.float32(1))) == 2


ROOT = pathlib.Path(__file__).parents[2]
PAIR = mesh_of(2)


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
