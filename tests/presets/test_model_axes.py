"""Presets beside tensor parallelism: each device encodes its own shards."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import jaxmotion
from jaxmotion import presets, transforms
from jaxmotion.transforms.extend import trace_state
from tests.meshes import mesh_of
from tests.transforms.worker import BATCH, PARAMS, SPECS, loss_fn

MESH = mesh_of(2, 2)
ALONE = mesh_of(2)
EVERY_STEP = {
  "power_sgd": presets.power_sgd("data", rank=1),
  "dgc": presets.dgc("data", min_size=0, warmup=0),
  "ef21_sgdm": presets.ef21_sgdm("data"),
  "onebit_adam": presets.onebit_adam("data", 0.1),
  "lion": presets.lion("data", 0.1),
}


def place(tree):
  return jax.tree.map(
    lambda a, s: jax.device_put(a, NamedSharding(MESH, s)), tree, SPECS
  )


@pytest.mark.parametrize("name", EVERY_STEP)
def test_a_step_of_shards_is_typed_as_one_of_whole_parameters(name):
  """Traced only: the exchange of shards is tested with its transformation."""
  tx = EVERY_STEP[name]
  opt_state = trace_state(tx, PARAMS, MESH, "data", SPECS)
  _, step = jaxmotion.make_train_step(loss_fn, tx, MESH, specs=SPECS)
  state = transforms.TrainState(PARAMS, None, opt_state)
  after, loss = jax.eval_shape(step, state, BATCH)
  assert jax.tree.structure(after) == jax.tree.structure(state)
  found = [(a.shape, a.dtype) for a in jax.tree.leaves(after)]
  assert found == [(a.shape, a.dtype) for a in jax.tree.leaves(state)]
  assert loss.shape == ()


def test_steps_on_shards_are_those_on_whole_parameters():
  scheme = presets.streaming_diloco(
    optax.adamw(0.01), every=4, fragments=2, codec=None
  )
  found = []
  for mesh, specs in [(MESH, SPECS), (ALONE, None)]:
    init, step = jaxmotion.make_train_step(loss_fn, scheme, mesh, specs=specs)
    state = init(place(PARAMS) if specs else PARAMS)
    for _ in range(4):
      state, _ = step(state, BATCH)
    found.append(state.params)
  whole = found.pop()
  for name, spec in SPECS.items():
    np.testing.assert_allclose(found[0][name], whole[name], atol=1e-6)
    sharding = NamedSharding(MESH, spec)
    assert found[0][name].sharding.is_equivalent_to(sharding, whole[name].ndim)
  assert state.opt_state.skipped == 0


def test_muon_is_refused_on_explicit_axes():
  mesh = mesh_of(2, 2, kind=AxisType.Explicit)
  init, _ = jaxmotion.make_train_step(
    loss_fn, presets.muloco(0.1), mesh, specs=SPECS
  )
  with pytest.raises(ValueError, match="`mesh` must have Auto axes"):
    jax.eval_shape(init, PARAMS)
