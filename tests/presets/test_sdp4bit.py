"""The preset `sdp4bit` on (emulated) hosts."""

import functools

import jax
import numpy as np
import optax

import jaxmotion
from jaxmotion import presets, wire
from tests.presets.helpers import (
  AXES,
  MESH,
  PARAMS,
  check_mean,
  loss_fn,
  normal_gradients,
)

TX = presets.sdp4bit(AXES, optax.sgd(1.0))


@functools.cache
def compiled():
  init, step = jaxmotion.make_train_step(loss_fn, TX, MESH, axis_name=AXES)
  batch = normal_gradients()
  args = (init(PARAMS), batch)
  return args, step.lower(*args).compile()


def test_it_sends_the_mean_of_matrices_and_vectors_alike():
  (state, batch), program = compiled()
  state = jax.tree.map(jax.numpy.copy, state)
  for i in range(3):
    before = jax.tree.map(np.asarray, state.params)
    state, _ = program(state, batch)
    master = jax.tree.map(np.asarray, state.opt_state.master.value)
    if i == 0:
      check_mean(master, batch, 0.15)
    for name, held in state.params.items():
      # What a difference lost is part of the next one.
      difference = np.abs(master[name] - before[name]).max()
      assert np.abs(held - master[name]).max() <= 0.51 / 7 * difference


def test_few_bytes_cross_between_hosts():
  _, program = compiled()
  sent = wire.compiled_bytes(program, mesh=MESH).per_axis()
  elements = sum(p.size for p in PARAMS.values())
  # Data parallel in float32 between 4 workers of which 2 share a link.
  assert sent["host",] < 2 * 4 * elements / 2 / 2 / 6
