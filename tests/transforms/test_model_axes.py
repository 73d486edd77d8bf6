"""Exchange and sharded optimizers beside tensor parallelism."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import checkpoint, codecs, perfmodel, transforms, wire
from jaxmotion.collectives import _all_reduce, _layout
from jaxmotion.memory import compress_state
from jaxmotion.transforms import _init_state
from tests.checkpoint.helpers import fill_randomly
from tests.collectives.helpers import copies
from tests.meshes import mesh_of
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
  mesh, tx = mesh_of(2, 2, kind=kind), optax.adam(0.05)

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


INT4 = codecs.uniform(bits=4, block=32)


def test_a_device_sends_its_own_shard_and_nothing_else():
  codec = codecs.feedback(INT4)
  tx, mesh = make_tx(codec, method="two_phase"), mesh_of(2, 2)
  init, step = jaxmotion.make_train_step(loss_fn, tx, mesh, specs=SPECS)
  state = init(PARAMS)
  traced = wire.step_bytes(step, state, BATCH)
  compiled = step.lower(state, BATCH).compile()
  sent = wire.compiled_bytes(compiled, mesh=mesh).per_axis()
  assert sent.keys() == {("data",), ("model",)}
  assert sent["data",] == traced.total_bytes
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


def test_a_shard_and_a_whole_array_of_one_shape_are_reduced_as_one(monkeypatch):
  params = {"shard": np.ones((8, 16), "f"), "whole": np.ones((8, 8), "f")}
  specs = {"shard": P(None, "model"), "whole": P()}

  def loss_fn(params, batch):
    y = batch["x"] @ params["whole"] @ params["shard"]
    return jnp.mean(jnp.tanh(y / 8) ** 2)

  batch = {"x": np.random.default_rng(0).normal(size=(8, 8)).astype("f")}
  found = []
  for limit in (1, 64):
    monkeypatch.setattr(_layout, "_MAX_STACKED_ELEMENTS", limit)
    _all_reduce._plan_tree.cache_clear()
    mesh = mesh_of(2, 2)
    init, step = jaxmotion.make_train_step(
      loss_fn, make_tx(codecs.feedback(INT4)), mesh, specs=specs
    )
    state = init(params)
    (*_, memory) = optax.tree.get(state.opt_state, "codec_state").value
    assert memory.first.memory.count.shape == ((4,) if limit == 1 else (4, 2))
    for _ in range(2):
      state, _ = step(state, batch)
    check_placed(state.params, mesh, specs)
    found.append(jax.device_get(state.params))
  jax.tree.map(np.testing.assert_array_equal, *found)


def test_devices_of_a_worker_agree_on_what_they_share():
  """Stochastic rounding of replicated leaves, and skipping for one shard."""
  codec = codecs.feedback(
    codecs.uniform(bits=4, block=32, rounding="stochastic")
  )
  tx = make_tx(codec, nonfinite="skip")
  mesh = mesh_of(2, 2)
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
  assert len(copies(state.params["b"])) == 1
  # One element of one shard on one worker is not finite.
  bad = {"ok": BATCH, "add": np.r_[add[1:], np.inf].astype(np.float32)}
  after, _ = step(state, bad)
  assert int(optax.tree.get(after.opt_state, "skipped")) == 1
  read = lambda state: optax.tree.get(state.opt_state, "codec_state")
  jax.tree.map(np.testing.assert_array_equal, read(state), read(after))


def test_a_state_for_ones_own_step_is_sharded_alike():
  mesh, tx = mesh_of(2, 2), make_tx(codecs.feedback(INT4))
  init, _ = jaxmotion.make_train_step(loss_fn, tx, mesh, specs=SPECS)
  expected = init(PARAMS).opt_state
  state = transforms.bind_mesh(tx, mesh, specs=SPECS).init(PARAMS)
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
      loss_fn, tx, mesh_of(2, 2), specs=specs
    )
    jax.eval_shape(step, jax.eval_shape(init, PARAMS), BATCH)


def test_a_state_of_whole_parameters_is_refused():
  mesh, tx = mesh_of(2, 2), make_tx()
  _, step = jaxmotion.make_train_step(loss_fn, tx, mesh, specs=SPECS)
  opt_state = transforms.bind_mesh(tx, mesh).init(PARAMS)
  state = transforms.TrainState(PARAMS, None, opt_state)
  message = "`specs` must say .* axes .'model',., got None"
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(step, state, BATCH)


def test_sharded_parameters_without_specs_are_refused():
  mesh = mesh_of(2, 2)
  tx = make_tx()
  init, _ = jaxmotion.make_train_step(loss_fn, tx, mesh)
  message = "`specs` must say .* got None for params/w1 of .*'model'"
  with pytest.raises(ValueError, match=message):
    init(place(PARAMS, mesh))
  with pytest.raises(ValueError, match=message):
    transforms.bind_mesh(tx, mesh).init(place(PARAMS, mesh))
  with pytest.raises(TypeError, match="`specs` must be a tree of Partition"):
    transforms.bind_mesh(tx, mesh, specs={"w": "model"})


def make_own_step(loss_fn, tx, mesh):
  """A step of one's own, on whole arrays."""
  place_batch = lambda batch: jax.device_put(
    batch, NamedSharding(mesh, P("data"))
  )

  @jax.jit
  def step(params, opt_state, batch):
    loss, grads = jaxmotion.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return lambda params, state, batch: step(params, state, place_batch(batch))


def test_a_step_of_ones_own_leaves_other_axes_to_the_model():
  mesh = mesh_of(2, 2)
  tx = transforms.bind_mesh(make_tx(), mesh)
  step = make_own_step(loss_fn, tx, mesh)
  params, opt_state = PARAMS, tx.init(PARAMS)
  for _ in range(2):
    params, opt_state, loss = step(params, opt_state, BATCH)
  check_trained(params, loss, mesh, dict.fromkeys(SPECS, P()))


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


def make_named(scheme, lengths, specs, loss=loss_fn, kind=AxisType.Auto):
  """Returns `init`, the step and its arguments, and the mesh."""
  mesh = mesh_of(*lengths.values(), names=lengths, kind=kind)
  tx = SCHEMES[scheme]
  init, step = jaxmotion.make_train_step(loss, tx, mesh, specs=specs)
  return init, step, (jax.eval_shape(init, PARAMS), BATCH), mesh


def test_a_constraint_over_the_workers_axis_names_the_cure():
  mesh = mesh_of(2, 2)
  sharding = NamedSharding(mesh, P(("data", "model")))

  def constrained_loss(params, batch):
    x = jax.lax.with_sharding_constraint(batch["x"], sharding)
    return jnp.mean(x @ params["w1"])

  init, step = jaxmotion.make_train_step(constrained_loss, make_tx(), mesh)
  with pytest.raises(
    ValueError, match="over the workers' axis.*value_and_grad"
  ):
    step(init(PARAMS), BATCH)


def test_whole_parameters_may_be_used_in_parts_by_a_model():
  mesh = mesh_of(2, 2)
  tx = make_tx(codecs.feedback(codecs.uniform(bits=8)))

  def constrain(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

  def divided_loss(params, batch):
    w = constrain(params["w"], "model")
    return jnp.mean((constrain(batch["x"], None, "model") @ w) ** 2)

  step = make_own_step(divided_loss, tx, mesh)
  # With so few columns XLA would divide the search for a scale.
  params = {"w": PARAMS["w1"][:, :3]}
  state = jaxmotion.bind_mesh(tx, mesh).init(params)
  _, _, loss = step(params, state, BATCH)
  expected = np.mean((BATCH["x"] @ params["w"]) ** 2)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("scheme", "name"),
  [
    ("sharded", "joined"),
    ("local_updates", "one"),
    ("fully_sharded", "joined"),
  ],
)
def test_an_axis_of_one_device_is_as_if_it_were_not_named(scheme, name):
  lengths, *both = MESHES[name]
  found = []
  for specs in both:
    init, step, args, mesh = make_named(scheme, lengths, specs)
    layout = checkpoint.describe_state(init, PARAMS, mesh, specs=specs)
    state = jax.device_get(init(PARAMS))
    resized = checkpoint.resize(
      *(init, fill_randomly(state.opt_state), PARAMS, layout, mesh),
      specs=specs,
    )
    made = state, jax.device_get(resized), layout.to_dict()
    found.append((made, step.lower(*args).as_text()))
  (made, text), (wanted, expected) = found
  jax.tree.map(np.testing.assert_array_equal, made, wanted)
  assert text == expected


def test_an_axis_of_one_device_may_be_explicit():
  lengths, specs, _ = MESHES["beside"]
  kind = AxisType.Explicit
  *_, step, args, _ = make_named(
    "exchange", lengths, specs, explicit_loss, kind
  )
  state, _ = step.eval_shape(*args)
  assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, args[0])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_axis_that_the_mesh_does_not_have_is_refused_by_init(scheme):
  for lengths in ({"data": 4}, {"data": 2, "model": 2}):
    init, _ = jaxmotion.make_train_step(
      loss_fn,
      SCHEMES[scheme],
      mesh_of(*lengths.values(), names=lengths),
      specs={"b": P(), "w1": P("modle"), "w2": P()},
    )
    message = r"`specs` must name axes of the mesh .*, got \['modle'\] at 'w1'"
    with pytest.raises(ValueError, match=message):
      init(PARAMS)


# Of 2 workers; the model's axis cuts the other dimension.
CUTS = {"b": P(), "w1": P("data", "model"), "w2": P("model", "data")}
ADAM = optax.adam(0.05)


def make_sharded(**options):
  options = {"weight_codec": codecs.identity()} | options
  return jaxmotion.sharded("data", ADAM, **options)


def check_state(state, mesh):
  mu = optax.tree.get(state, "mu")
  trees = [mu, state.master.value] if state.master.value else [mu]
  for tree in trees:
    assert jax.tree.map(np.shape, tree) == jax.tree.map(np.shape, PARAMS)
    check_placed(tree, mesh, CUTS)


@pytest.mark.parametrize("kind", ["exchange", "sharded"])
def test_identity_is_the_plain_step_of_jit(kind):
  mesh, is_sharded = mesh_of(2, 2), kind == "sharded"
  tx = make_sharded(weight_codec=None) if is_sharded else make_tx()
  init, step = jaxmotion.make_train_step(loss_fn, tx, mesh, specs=SPECS)
  state = init(place(PARAMS, mesh))
  compiled = step.lower(state, BATCH).compile()
  for _ in range(2):
    state, loss = step(state, BATCH)
  check_trained(state.params, loss, mesh)
  mu = optax.tree.get(state.opt_state, "mu")
  check_placed(mu, mesh, CUTS if is_sharded else SPECS)
  if is_sharded:
    check_state(state.opt_state, mesh)
  # The model sends what it sends without an exchange.
  sent, expected = (
    wire.compiled_bytes(program, mesh=mesh).select(axes=("model",))
    for program in (compiled, plain_step()[2])
  )
  assert sent.moves and sent == expected


def draw_gradients(steps):
  """Of every example, far from equal: its gradient is itself."""
  rng = np.random.default_rng(1)
  return [
    {k: rng.normal(size=(4, *a.shape)).astype("f") for k, a in PARAMS.items()}
    for _ in range(steps)
  ]


def linear_loss(params, batch):
  return sum(jnp.sum(params[k] * jnp.mean(batch[k], 0)) for k in params)


@functools.cache
def train_coded():
  """(state, compiled step, traced bytes, skipped state) through 4 bits."""
  codec = codecs.uniform(bits=4, block=32, rounding="stochastic")
  tx = jaxmotion.sharded(
    "data",
    optax.sgd(1.0),
    gradient_codec=codecs.feedback(codec),
    weight_codec=codec,
    nonfinite="skip",
  )
  mesh, grads = mesh_of(2, 2), draw_gradients(3)
  init, step = jaxmotion.make_train_step(
    linear_loss, tx, mesh, specs=SPECS, donate=False
  )
  state = init(place(PARAMS, mesh))
  traced = wire.step_bytes(step, state, grads[0])
  compiled = step.lower(state, grads[0]).compile()
  for batch in grads:
    state, _ = step(state, batch)
  # One element of one shard on one worker is not finite.
  bad = grads[0] | {"w1": grads[0]["w1"].copy()}
  bad["w1"][0, 0, 0] = np.nan
  return state, compiled, traced, step(state, bad)[0]


def test_codecs_conserve_what_came_in():
  params, _, state = train_coded()[0]
  exact = {
    k: sum(g[k].astype(np.float64).mean(0) for g in draw_gradients(3))
    for k in PARAMS
  }
  rows, ((whole, _),) = state.codec_state.value
  codec = codecs.feedback(codecs.uniform(bits=4, block=32))
  # Rows of devices, data major: the mean over workers, of each model's shard.
  error = {"b": jax.jit(jax.vmap(codec.error))(whole)[::2].mean(0)}
  errors = jax.jit(jax.vmap(jax.vmap(codec.error)))
  for name, axis, memory in zip(("w1", "w2"), (0, 1), rows, strict=True):
    own = np.asarray(errors(memory), np.float64)
    shards = own.reshape(2, 2, *own.shape[1:]).mean(0)  # (model, part, ...)
    error[name] = np.concatenate(
      [np.concatenate(list(shard), axis) for shard in shards], 1 - axis
    )
  for name in PARAMS:
    sent = PARAMS[name] - np.asarray(state.master.value[name], np.float64)
    np.testing.assert_allclose(sent + error[name], exact[name], atol=1e-5)
    assert np.abs(error[name]).max() > 1e-3
  for name in ("w1", "w2"):
    # What parameters are off by was lost of one difference, in 4 bits.
    off = np.asarray(params[name]) - np.asarray(state.master.value[name])
    last = np.abs(draw_gradients(3)[-1][name].mean(0)).max()
    assert 0 < np.abs(off).max() < 2 * last / 7


def test_a_device_sends_its_own_part_and_nothing_else():
  _, compiled, traced, _ = train_coded()
  # Each of two workers sends one part of two, and then its own part.
  parts = {"w1": jnp.zeros((4, 16)), "w2": jnp.zeros((16, 4))}
  codec = codecs.uniform(bits=4, block=32)
  expected = sum(2 * wire.payload_bytes(codec, part) for part in parts.values())
  expected += wire.payload_bytes(codec, jnp.zeros(8)) + 4  # b, and the loss.
  agreement = 6  # All four devices agree, by a sum, that all is finite.
  assert traced.total_bytes == expected + agreement
  own = 2 * 4  # The loss adds up the shards of w1, and those of w2.
  assert wire.compiled_bytes(compiled).total_bytes == traced.total_bytes + own


def test_devices_of_a_worker_agree_on_what_sharding_shares():
  (params, _, state), _, _, (skipped, _, after) = train_coded()
  assert len(copies(params["b"])) == 1
  assert int(after.skipped) == 1
  jax.tree.map(np.testing.assert_array_equal, skipped, params)
  jax.tree.map(
    np.testing.assert_array_equal,
    (after.master, after.inner, after.codec_state),
    (state.master, state.inner, state.codec_state),
  )


def test_types_of_explicit_axes_tell_what_is_sharded():
  """In a step of one's own and in one that `make_train_step` makes."""
  mesh, tx = mesh_of(2, 2, kind=AxisType.Explicit), make_sharded()
  params = place(PARAMS, mesh)
  bound = transforms.bind_mesh(tx, mesh, specs=SPECS)

  step = make_own_step(explicit_loss, bound, mesh)

  state = params, bound.init(params)
  check_state(state[-1], mesh)
  with jax.set_mesh(mesh):
    for _ in range(2):
      *state, loss = step(*state, BATCH)
  check_trained(state[0], loss, mesh)
  check_state(state[-1], mesh)
  init, step = jaxmotion.make_train_step(explicit_loss, tx, mesh, specs=SPECS)
  made, _ = step.eval_shape(jax.eval_shape(init, params), BATCH)
  typed = lambda tree: [
    (a.shape, a.sharding.spec) for a in jax.tree.leaves(tree)
  ]
  assert typed(made.opt_state) == typed(state[-1])


def trace_update(tx, specs=SPECS, params=PARAMS, axis_names=("data",)):
  """Traces a state and an update of two workers; nothing is compiled."""

  def update(params):
    varying = tuple(sorted(set(axis_names) - {"model"}))
    grads = jax.tree.map(
      lambda a: jax.lax.pcast(a, varying, to="varying"), params
    )
    state = _init_state.shard_states(tx.init(params), params, specs)
    return tx.update(grads, state, params)[0]

  full = "model" in axis_names
  own = SPECS if specs is None else specs
  mapped = jax.shard_map(
    update,
    mesh=mesh_of(2, 2),
    in_specs=(own if full else P(),),
    out_specs=own if full else P(),
    axis_names=set(axis_names),
  )
  return jax.eval_shape(mapped, jax.tree.map(jnp.asarray, params))


def test_a_map_over_all_axes_wants_specs_too():
  both = ("data", "model")
  assert trace_update(make_sharded(), axis_names=both)["w1"].shape == (8, 32)
  with pytest.raises(ValueError, match="`specs` must say .*'model'.* `w1`"):
    trace_update(make_sharded(), None, axis_names=both)


def test_updates_that_look_across_a_shard_of_the_model_are_refused():
  # Workers do not cut the only dimension, which the model's axis shards.
  params, specs = {"b": np.zeros(256, np.float32)}, {"b": P("model")}
  for inner in (optax.lamb(1e-3), optax.clip_by_global_norm(1.0)):
    tx = jaxmotion.sharded("data", inner)
    with pytest.raises(ValueError, match="`tx` must treat every element"):
      trace_update(tx, specs, params)
  trace_update(jaxmotion.sharded("data", ADAM), specs, params)


def test_encoded_moments_are_each_devices_own():
  inner = compress_state(ADAM, min_leaf_size=64)
  tx = jaxmotion.sharded("data", inner)
  state = jax.eval_shape(
    lambda: transforms.bind_mesh(tx, mesh_of(2, 2), specs=SPECS).init(PARAMS)
  )
  leaves = jax.tree.leaves(state.inner.value)
  specs = jax.tree.leaves(state.inner.specs().value)
  encoded = [
    spec
    for a, spec in zip(leaves, specs, strict=True)
    if a.shape and a.shape not in {x.shape for x in PARAMS.values()}
  ]
  assert encoded
  for spec in encoded:
    assert {n for e in spec for n in (e or ())} == {"data", "model"}, spec
  trace_update(tx)


def test_the_clip_takes_the_norm_over_workers_and_the_model():
  clip = transforms.clip_by_global_norm(0.5, "data")
  tx = jaxmotion.sharded("data", optax.chain(clip, optax.sgd(1.0)))
  (grads,) = draw_gradients(1)
  init, step = jaxmotion.make_train_step(
    linear_loss, tx, mesh_of(2, 2), specs=SPECS
  )
  state, _ = step(init(PARAMS), grads)
  means = {k: g.mean(0) for k, g in grads.items()}
  norm = np.sqrt(sum(np.sum(g**2) for g in means.values()))
  for name, mean in means.items():
    np.testing.assert_allclose(
      state.params[name], PARAMS[name] - 0.5 * mean / norm, atol=1e-6
    )
