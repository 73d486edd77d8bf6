"""The presets `sdp4bit` and `zeropp` on (emulated) hosts."""

import functools

import jax
import numpy as np
import optax

import jaxmotion
from jaxmotion import presets, transforms
from tests.presets.helpers import (
  AXES,
  MESH,
  PARAMS,
  check_mean,
  constant_gradients,
  loss_fn,
  normal_gradients,
)


def gathered_loss(params, batch):
  return transforms.gather_block(loss_fn)(params, batch)


@functools.cache
def compiled(name):
  if name == "sdp4bit":
    loss, scheme = loss_fn, presets.sdp4bit(AXES, optax.sgd(1.0))
  else:
    loss, scheme = gathered_loss, presets.zeropp(optax.sgd(1.0))
  init, step = jaxmotion.make_train_step(loss, scheme, MESH, axis_name=AXES)
  state = init(PARAMS)
  return state, step.lower(state, normal_gradients()).compile()


def test_sdp4bit_sends_the_mean_of_matrices_and_vectors_alike():
  batch = normal_gradients()
  state, program = compiled("sdp4bit")
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


def update(batch):
  state, program = compiled("zeropp")
  state, _ = program(jax.tree.map(jax.numpy.copy, state), batch)
  return state.params


def test_zeropp_sends_the_mean_of_matrices_and_vectors_alike():
  batch = normal_gradients()
  check_mean(update(batch), batch, 0.15)
  for found in update(constant_gradients()).values():  # All are maxima.
    np.testing.assert_allclose(-np.asarray(found), 2.5, rtol=1e-4)
