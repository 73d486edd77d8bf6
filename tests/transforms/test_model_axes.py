"""Exchange beside tensor parallelism: axes of the model stay the model's."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs, perfmodel, transforms, wire
from tests.transforms.helpers import assert_close, assert_same

RNG = np.random.default_rng(0)
PARAMS = {
  "b": np.zeros(8, np.float32),
  "w1": RNG.normal(size=(8, 32)).astype(np.float32) / 4,
  "w2": RNG.normal(size=(32, 8)).astype(np.float32) / 4,
}
SPECS = {"b": P(), "w1": P(None, "model"), "w2": P("model")}
BATCH = {
  "x": RNG.normal(size=(8, 8)).astype(np.float32),
  "y": RNG.normal(size=(8, 8)).astype(np.float32),
}


def make_mesh(kind=AxisType.Auto):
  return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)


def loss_fn(params, batch):
  params = transforms.gather_params(params)
  y = jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"] + params["b"][None]
  return jnp.mean((y - batch["y"]) ** 2)


def place(tree, mesh, specs=SPECS):
  return jax.tree.map(
    lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), tree, specs
  )


def make_tx(codec=None, **options):
  exchange = jaxmotion.exchange("data", codec, **options)
  return optax.chain(exchange, optax.adam(0.05))


@functools.cache
def plain_step(kind=AxisType.Auto):
  """A step under `jit` alone: its results after 2 steps, and its program."""
  mesh, tx = make_mesh(kind), optax.adam(0.05)

  @jax.jit
  def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = place(PARAMS, mesh)
  state = params, jax.jit(tx.init)(params)
  batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
  compiled = step.lower(*state, batch).compile()
  for _ in range(2):
    *state, loss = step(*state, batch)
  return state[0], loss, compiled


def check_placed(tree, mesh, specs=SPECS):
  """Checks where arrays are on a mesh."""
  for name, spec in specs.items():
    sharding = NamedSharding(mesh, spec)
    assert tree[name].sharding.is_equivalent_to(sharding, tree[name].ndim)


def check_trained(params, loss, mesh, specs=SPECS):
  """Compares the results of two steps with those of `plain_step`."""
  expected, expected_loss, _ = plain_step()
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
  assert_close(params, expected)
  check_placed(params, mesh, specs)


_MESH = "mesh['data'=2,'model'=2] {'%s'}"
GROUPS = {
  "model": ("{{0,1},{2,3}}", "[2,2]<=[4]", _MESH % "model"),
  "data": ("{{0,2},{1,3}}", "[2,2]<=[2,2]T(1,0)", _MESH % "data"),
}


def list_collectives(compiled, axis):
  """(name, type) of what a compiled program sends over an axis of the mesh."""
  found = re.findall(
    r"= (\S+) (all-reduce|all-gather|all-to-all|collective-permute|"
    r"reduce-scatter)\(.*?replica_groups=(.*?), [a-z_]+=",
    compiled.as_text(),
  )
  known = [group for groups in GROUPS.values() for group in groups]
  assert found and all(where in known for _, _, where in found), found
  return sorted((op, a) for a, op, where in found if where in GROUPS[axis])


def test_identity_is_the_plain_step_of_jit():
  mesh = make_mesh()
  init, step = jaxmotion.make_train_step(loss_fn, make_tx(), mesh, specs=SPECS)
  state = init(place(PARAMS, mesh))
  compiled = step.lower(state, BATCH).compile()
  for _ in range(2):
    state, loss = step(state, BATCH)
  check_trained(state.params, loss, mesh)
  check_placed(optax.tree.get(state.opt_state, "mu"), mesh)
  plain = plain_step()[2]
  assert list_collectives(compiled, "model") == list_collectives(plain, "model")


INT4 = codecs.uniform(bits=4, block=32)


def test_a_device_sends_its_own_shard_and_nothing_else():
  codec = codecs.feedback(INT4)
  tx = make_tx(codec, method="two_phase")
  init, step = jaxmotion.make_train_step(loss_fn, tx, make_mesh(), specs=SPECS)
  state = init(PARAMS)
  traced = wire.step_bytes(step, state, BATCH)
  compiled = step.lower(state, BATCH).compile()
  plain = plain_step()[2]
  assert list_collectives(compiled, "model") == list_collectives(plain, "model")
  # What the model sends: float32, all-reduced between two devices.
  own = sum(
    4 * math.prod(map(int, re.search(r"f32\[(.*?)\]", what)[1].split(",")))
    for _, what in list_collectives(plain, "model")
  )
  assert own and wire.compiled_bytes(compiled).total_bytes == (
    traced.total_bytes + own
  )
  shards = {
    "b": jnp.zeros(8),
    "w1": jnp.zeros((8, 16)),
    "w2": jnp.zeros((16, 8)),
  }
  data = perfmodel.builtin_platform("ethernet_1gbit").resize(data=2)
  predicted = perfmodel.exchange_ledger(
    shards, data, "data", codec, method="two_phase"
  )
  assert traced.total_bytes == predicted.total_bytes + 4  # And the loss.


def explicit_loss(params, batch):
  h = jnp.matmul(batch["x"], params["w1"], out_sharding=P(None, "model"))
  y = jnp.matmul(jnp.tanh(h), params["w2"], out_sharding=P(None, None))
  return jnp.mean((y + params["b"][None] - batch["y"]) ** 2)


def test_types_of_explicit_axes_tell_the_exchange_what_is_sharded():
  mesh = make_mesh(AxisType.Explicit)
  tx = make_tx()
  init, step = jaxmotion.make_train_step(explicit_loss, tx, mesh, specs=SPECS)
  state = init(place(PARAMS, mesh))
  for _ in range(2):
    state, loss = step(state, BATCH)
  check_trained(state.params, loss, mesh)


def test_devices_of_a_worker_agree_on_what_they_share():
  """Stochastic rounding of replicated leaves, and skipping for one shard."""
  codec = codecs.feedback(
    codecs.uniform(bits=4, block=32, rounding="stochastic")
  )
  tx = make_tx(codec, nonfinite="skip")
  mesh = make_mesh()
  init, step = jaxmotion.make_train_step(
    lambda params, batch: (
      loss_fn(params, batch["ok"])
      + jnp.sum(params["w1"][0, 0] * jnp.sum(batch["add"]))
    ),
    tx,
    mesh,
    specs=SPECS,
    donate=False,
  )
  add = np.zeros(8, np.float32)
  state = init(PARAMS)
  memory = optax.tree.get(state.opt_state, "codec_state")
  for a in jax.tree.leaves(memory):
    assert a.sharding.spec[0] == ("data", "model") and a.shape[0] == 4
  state, _ = step(state, {"ok": BATCH, "add": add})
  first, *others = [
    np.asarray(s.data) for s in state.params["b"].addressable_shards
  ]
  for other in others:
    np.testing.assert_array_equal(first, other)
  # One element of one shard on one worker is not finite.
  bad = {"ok": BATCH, "add": np.r_[add[1:], np.inf].astype(np.float32)}
  after, _ = step(state, bad)
  assert int(optax.tree.get(after.opt_state, "skipped")) == 1
  read = lambda state: optax.tree.get(state.opt_state, "codec_state")
  jax.tree.map(np.testing.assert_array_equal, read(state), read(after))


def test_a_state_for_ones_own_step_is_sharded_alike():
  mesh, tx = make_mesh(), make_tx(codecs.feedback(INT4))
  init, _ = jaxmotion.make_train_step(loss_fn, tx, mesh, specs=SPECS)
  expected = init(PARAMS).opt_state
  state = transforms.init_state(tx, PARAMS, mesh, specs=SPECS)
  assert_same(state, expected)


BUCKETS = codecs.buckets(codecs.uniform(bits=8), max_leaf_size=1024)


@pytest.mark.parametrize(
  ("tx", "specs", "message"),
  [
    (make_tx(), {"b": P()}, "`specs` must be a PartitionSpec or a tree"),
    (make_tx(), P("pipe"), r"must name axes of the mesh .* \['pipe'\]"),
    (make_tx(), P("data"), "must name axes of the model, not .* workers"),
    (make_tx(), P(None, "model"), "must shard dimensions that .* at 'b'"),
    (make_tx(BUCKETS), SPECS, "`codec` must not join leaves .* 'w1'"),
  ],
)
def test_specs_that_do_not_fit_are_refused(tx, specs, message):
  with pytest.raises(ValueError, match=message):
    init, step = jaxmotion.make_train_step(
      loss_fn, tx, make_mesh(), specs=specs
    )
    jax.eval_shape(step, jax.eval_shape(init, PARAMS), BATCH)


def test_a_state_of_whole_parameters_is_refused():
  mesh, tx = make_mesh(), make_tx()
  _, step = jaxmotion.make_train_step(loss_fn, tx, mesh, specs=SPECS)
  opt_state = transforms.init_state(tx, PARAMS, mesh)
  state = transforms.TrainState(PARAMS, None, opt_state)
  message = "`specs` must say .* axes .'model',., got None"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(step, state, BATCH)


def test_sharded_parameters_without_specs_are_refused():
  mesh = make_mesh()
  tx = make_tx()
  init, _ = jaxmotion.make_train_step(loss_fn, tx, mesh)
  message = "`specs` must say .* got None for params/w1 of .*'model'"
  with pytest.raises(ValueError, match=message):
    init(place(PARAMS, mesh))
  with pytest.raises(ValueError, match=message):
    transforms.init_state(tx, place(PARAMS, mesh), mesh)
  with pytest.raises(TypeError, match="`specs` must be a tree of Partition"):
    transforms.bind_mesh(tx, mesh, specs={"w": "model"})


@pytest.mark.parametrize("specs", (SPECS, None))
def test_a_step_on_every_worker_leaves_other_axes_to_the_model(specs):
  mesh = make_mesh()
  tx = make_tx()
  tx = transforms.bind_mesh(tx, mesh, specs=specs)

  @transforms.parallelize_step(mesh)
  def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = PARAMS if specs is None else place(PARAMS, mesh)
  opt_state = tx.init(params)
  for _ in range(2):
    params, opt_state, loss = step(params, opt_state, BATCH)
  whole = dict.fromkeys(SPECS, P())
  check_trained(params, loss, mesh, whole if specs is None else specs)


# Axes of one device, or axes that the mesh does not have.
CODED = jaxmotion.exchange("data", codecs.feedback(INT4))
SCHEMES = {
  "exchange": optax.chain(CODED, optax.adam(1e-2)),
  "sharded": jaxmotion.sharded(
    "data", optax.adam(1e-2), gradient_codec=codecs.feedback(INT4)
  ),
  "local_updates": jaxmotion.local_updates(
    optax.sgd(0.1), optax.chain(CODED, optax.sgd(0.7)), every=2
  ),
  "fully_sharded": jaxmotion.fully_sharded(optax.adam(1e-2)),
}
ALONE = {"data": 2, "model": 2, "expert": 1}
MESHES = {
  "one": (
    {"data": 4, "model": 1},
    SPECS | {"b": P("model")},
    {"b": P(), "w1": P(), "w2": P()},
  ),
  "beside": (
    ALONE,
    {"b": P("expert"), "w1": P("expert", "model"), "w2": P("model")},
    SPECS,
  ),
  "joined": (
    ALONE,
    {
      "b": P(("expert", "model")),
      "w1": P(None, ("model", "expert")),
      "w2": P(("model", "expert")),
    },
    SPECS | {"b": P("model")},
  ),
}


def mesh_of(lengths, kind=AxisType.Auto):
  devices = np.array(jax.devices()[:4]).reshape(*lengths.values())
  return Mesh(devices, tuple(lengths), axis_types=(kind,) * len(lengths))


def train_named(scheme, mesh, specs, loss=loss_fn):
  init, step = jaxmotion.make_train_step(
    loss, SCHEMES[scheme], mesh, specs=specs
  )
  state = init(PARAMS)
  layout = checkpoint.describe_state(init, PARAMS, mesh, specs=specs)
  state, _ = step(state, BATCH)
  resized = checkpoint.resize(
    init, state.opt_state, PARAMS, layout, mesh, specs=specs
  )
  return jax.device_get((state, resized)), layout


@pytest.mark.parametrize(
  ("scheme", "name"),
  [
    ("exchange", "beside"),
    ("sharded", "joined"),
    ("local_updates", "one"),
    ("fully_sharded", "joined"),
  ],
)
def test_an_axis_of_one_device_is_as_if_it_were_not_named(scheme, name):
  lengths, specs, short = MESHES[name]
  mesh = mesh_of(lengths)
  found = train_named(scheme, mesh, specs)
  wanted = train_named(scheme, mesh, short)
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_an_axis_of_one_device_may_be_explicit():
  lengths, specs, _ = MESHES["beside"]
  mesh = mesh_of(lengths, AxisType.Explicit)
  (state, _), _ = train_named("exchange", mesh, specs, explicit_loss)
  assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.params))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_axis_that_the_mesh_does_not_have_is_refused_by_init(scheme):
  for lengths in ({"data": 4}, {"data": 2, "model": 2}):
    init, _ = jaxmotion.make_train_step(
      loss_fn,
      SCHEMES[scheme],
      mesh_of(lengths),
      specs={"b": P(), "w1": P("modle"), "w2": P()},
    )
    message = r"`specs` must name axes of the mesh .*, got \['modle'\] at 'w1'"
    with pytest.raises(ValueError, match=message):
      init(PARAMS)
