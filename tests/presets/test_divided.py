"""The presets `sdp4bit` and `zeropp` on (emulated) hosts."""

import functools

import jax
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import presets, transforms, wire
from tests.presets.helpers import (
  AXES,
  MESH,
  PARAMS,
  check_mean,
  constant_gradients,
  loss_fn,
  normal_gradients,
)

ELEMENTS = sum(p.size for p in PARAMS.values())


def gathered_loss(params, batch):
  return transforms.gather_block(loss_fn)(params, batch)


@functools.cache
def compiled(name):
  scheme = {
    "sdp4bit": lambda: presets.sdp4bit(AXES, optax.sgd(1.0)),
    "zeropp": lambda: presets.zeropp(optax.sgd(1.0)),
  }[name]()
  loss = loss_fn if name == "sdp4bit" else gathered_loss
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


def test_positive_maxima_are_kept():
  for found in update(constant_gradients()).values():
    np.testing.assert_allclose(-np.asarray(found), 2.5, rtol=1e-4)


@pytest.mark.parametrize(
  ("name", "most"),
  [
    # Data parallel in float32 between 4 workers of which 2 share a link.
    ("sdp4bit", 2 * 4 / 2 / 2 / 6),
    # In float32, gathered twice, of which a device sends a quarter.
    ("zeropp", 12 / 4 / 7.5),
  ],
)
def test_few_bytes_cross_between_hosts(name, most):
  _, program = compiled(name)
  sent = wire.compiled_bytes(program, mesh=MESH).per_axis()
  assert sent["host",] < most * ELEMENTS


def test_options_that_it_sets_are_refused_by_name():
  with pytest.raises(TypeError, match="`regather` must not be given"):
    presets.zeropp(optax.sgd(1.0), regather=True)
