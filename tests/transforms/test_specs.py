"""Specs that name axes of one device, or axes that the mesh does not have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec as P

from jaxmotion import checkpoint, codecs, transforms

RNG = np.random.default_rng(0)
PARAMS = {
  "b": np.zeros(8, np.float32),
  "w": RNG.normal(size=(8, 8)).astype(np.float32),
}
BATCH = RNG.normal(size=(8, 8)).astype(np.float32)
CODEC = codecs.feedback(codecs.uniform(bits=4))


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"][None]) ** 2)


SCHEMES = {
  "exchange": lambda: optax.chain(
    transforms.exchange("data", CODEC), optax.adam(1e-2)
  ),
  "sharded": lambda: transforms.sharded(
    "data", optax.adam(1e-2), gradient_codec=CODEC
  ),
  "local_updates": lambda: transforms.local_updates(
    optax.sgd(0.1),
    optax.chain(transforms.exchange("data", CODEC), optax.sgd(0.7)),
    every=2,
  ),
  "fully_sharded": lambda: transforms.fully_sharded(optax.adam(1e-2)),
}
MESHES = {
  "one": (
    {"data": 4, "model": 1},
    {"b": P("model"), "w": P(None, "model")},
    {"b": P(), "w": P()},
  ),
  "beside": (
    {"data": 2, "model": 2, "expert": 1},
    {"b": P("expert"), "w": P("model", "expert")},
    {"b": P(), "w": P("model")},
  ),
  "joined": (
    {"data": 2, "model": 2, "expert": 1},
    {"b": P(("expert", "model")), "w": P(None, ("model", "expert"))},
    {"b": P("model"), "w": P(None, "model")},
  ),
}


def make_mesh(lengths, kind=AxisType.Auto):
  devices = np.array(jax.devices()[:4]).reshape(*lengths.values())
  return Mesh(devices, tuple(lengths), axis_types=(kind,) * len(lengths))


def train(scheme, mesh, specs):
  init, step = transforms.make_train_step(loss_fn, scheme, mesh, specs=specs)
  state = init(PARAMS)
  layout = checkpoint.describe_state(init, PARAMS, mesh, specs=specs)
  for _ in range(2):
    state, _ = step(state, BATCH)
  resized = checkpoint.resize(
    init, state.opt_state, PARAMS, layout, mesh, specs=specs
  )
  return jax.device_get((state, resized)), layout


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_axis_of_one_device_is_as_if_it_were_not_named(scheme, name):
  lengths, specs, short = MESHES[name]
  mesh = make_mesh(lengths)
  found = train(SCHEMES[scheme](), mesh, specs)
  wanted = train(SCHEMES[scheme](), mesh, short)
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_an_axis_of_one_device_may_be_explicit():
  for lengths, specs, _ in MESHES.values():
    mesh = make_mesh(lengths, AxisType.Explicit)
    (state, _), _ = train(SCHEMES["exchange"](), mesh, specs)
    assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.params))


@pytest.mark.parametrize("lengths", [{"data": 4}, {"data": 2, "model": 2}])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_axis_that_the_mesh_does_not_have_is_refused_by_init(
  scheme, lengths
):
  init, _ = transforms.make_train_step(
    loss_fn,
    SCHEMES[scheme](),
    make_mesh(lengths),
    specs={"b": P(), "w": P("modle")},
  )
  message = r"`specs` must name axes of the mesh .*, got \['modle'\] at 'w'"
  with pytest.raises(ValueError, match=message):
    init(PARAMS)
