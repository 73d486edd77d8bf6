"""The preset `zeropp` on (emulated) hosts."""

import functools

import jax
import numpy as np
import optax
import pytest

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


def gathered_loss(params, batch):
  return transforms.gather_block(loss_fn)(params, batch)


@functools.cache
def compiled():
  init, step = transforms.make_train_step(
    gathered_loss, presets.zeropp(optax.sgd(1.0)), MESH, axis_name=AXES
  )
  state = init(PARAMS)
  return state, step.lower(state, normal_gradients()).compile()


def update(batch):
  state, program = compiled()
  state, _ = program(jax.tree.map(jax.numpy.copy, state), batch)
  return state.params


def test_it_sends_the_mean_of_matrices_and_vectors_alike():
  batch = normal_gradients()
  check_mean(update(batch), batch, 0.15)


def test_positive_maxima_are_kept():
  for found in update(constant_gradients()).values():
    np.testing.assert_allclose(-np.asarray(found), 2.5, rtol=1e-4)


def test_few_bytes_cross_between_hosts():
  _, program = compiled()
  sent = wire.compiled_bytes(program, mesh=MESH).per_axis()
  elements = sum(p.size for p in PARAMS.values())
  # In float32, gathered twice, of which a device sends a quarter.
  assert 12 * elements / 4 / sent["host",] > 7.5


def test_options_that_it_sets_are_refused_by_name():
  with pytest.raises(TypeError, match="`regather` must not be given"):
    presets.zeropp(optax.sgd(1.0), regather=True)
