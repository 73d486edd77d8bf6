"""Compression in an ordinary `jax.jit`: the loss sees the whole batch."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from jax.sharding import (
  AbstractDevice,
  AbstractMesh,
  AxisType,
  NamedSharding,
  PartitionSpec as P,
)

import jaxmotion
from jaxmotion import codecs, transforms, wire
from tests.paths import ROOT

INT8 = codecs.feedback(codecs.uniform(bits=8))
DEVICES = np.array(jax.devices())
MESHES = {
  "auto": jax.sharding.Mesh(DEVICES[:4], ("data",)),
  "explicit": jax.make_mesh(
    (4,), ("data",), axis_types=(AxisType.Explicit,), devices=DEVICES[:4]
  ),
  "model": jax.sharding.Mesh(DEVICES.reshape(4, 2), ("data", "model")),
}
RNG = np.random.default_rng(0)
PARAMS = {
  "embedding": RNG.normal(size=(32, 64)).astype("float32") / 8,
  "hidden": RNG.normal(size=(64, 128)).astype("float32") / 8,
  "bias": np.zeros((1, 1, 128), "float32"),
  "head": RNG.normal(size=(128, 32)).astype("float32") / 8,
}


def put(mesh, tree, *spec):
  """Places arrays on a mesh, by the entries of a partition spec."""
  return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def make_batch(mesh, seed):
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, 32, (16, 6))
  mask = (np.arange(6) < rng.integers(1, 7, (16, 1))).astype("float32")
  batch = {"x": tokens, "y": tokens * 7 % 32, "mask": mask}
  return put(mesh, batch, "data")


def place_params(mesh):
  def place(a):
    is_sharded = "model" in mesh.axis_names and a.shape[0] > 1
    return put(mesh, a, "model" if is_sharded else None)

  return jax.tree.map(place, PARAMS)


def masked_loss(params, batch):
  h = jax.nn.one_hot(batch["x"], 32) @ params["embedding"]
  h = jnp.tanh(h @ params["hidden"] + params["bias"])
  logits, labels = h @ params["head"], jax.nn.one_hot(batch["y"], 32)
  losses = optax.softmax_cross_entropy(logits, labels)
  tokens = jnp.sum(batch["mask"])
  return jnp.sum(losses * batch["mask"]) / tokens, {"tokens": tokens}


@functools.cache
def train(kind, codec, steps=6):
  """(metrics of each step, parameters, bytes on links); no codec: plain JAX."""
  mesh = MESHES[kind]
  value_and_grad = jax.value_and_grad
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
  if codec is not None:
    value_and_grad = jaxmotion.value_and_grad
    tx = optax.chain(jaxmotion.exchange("data", codec), tx)

  @jax.jit
  def step(state, batch):
    (loss, metrics), grads = value_and_grad(masked_loss, has_aux=True)(
      state.params, batch
    )
    return state.apply_gradients(grads=grads), metrics | {"loss": loss}

  state = train_state.TrainState.create(
    apply_fn=masked_loss, params=place_params(mesh), tx=tx
  )
  seen = []
  for i in range(steps):
    state, metrics = step(state, batch := make_batch(mesh, i))
    seen.append({name: float(v) for name, v in metrics.items()})
  compiled = step.lower(state, batch).compile()
  return (
    seen,
    jax.tree.map(np.asarray, state.params),
    wire.compiled_bytes(compiled).total_bytes,
  )


@pytest.mark.parametrize("kind", MESHES)
def test_at_full_precision_it_is_the_trainer_that_it_joins(kind):
  seen, params, _ = train(kind, codecs.identity())
  wanted, plain, _ = train(kind, None)
  for own, other in zip(seen, wanted, strict=True):
    assert own["tokens"] == other["tokens"]
    assert own["loss"] == pytest.approx(other["loss"], rel=1e-6)
  for a, b in zip(*map(jax.tree.leaves, (params, plain)), strict=True):
    np.testing.assert_allclose(a, b, atol=5e-6 * np.abs(b).max() + 1e-7)


@pytest.mark.parametrize(
  "kind, codec, ratio",
  [
    ("auto", codecs.feedback(codecs.uniform(bits=4)), 8),
    ("explicit", codecs.uniform(bits=8), 4),
  ],
)
def test_gradients_are_sent_by_the_codec_alone(kind, codec, ratio):
  seen, _, sent = train(kind, codec)
  wanted, _, plain = train(kind, None)
  assert sent == pytest.approx(plain / ratio, rel=0.05)
  assert seen[-1]["loss"] < wanted[0]["loss"]


def test_shards_of_a_model_are_encoded_where_they_are():
  # Of the plain step's bytes those between workers become a quarter.
  _, _, sent = train("model", codecs.uniform(bits=8))
  _, _, full = train("model", codecs.identity())
  shards = 4 * sum(a.size / (1 + (a.shape[0] > 1)) for a in PARAMS.values())
  between = 2 * 3 / 4 * shards
  assert full - sent == pytest.approx(between * 3 / 4, rel=0.05)


def test_microbatches_are_exchanged_once():
  mesh = MESHES["auto"]
  tx = jaxmotion.exchange("data", codecs.uniform(bits=8))
  loss = lambda params, batch: masked_loss(params, batch)[0]

  @jax.jit
  def step(params, state, *batches):
    grads = [jaxmotion.grad(loss)(params, b) for b in batches]
    total = jax.tree.map(lambda *g: sum(g[1:], g[0]) / len(g), *grads)
    return tx.update(total, state)[0]

  params = place_params(mesh)
  batches = [make_batch(mesh, i) for i in range(2)]
  updates = step(params, tx.init(params), *batches)
  wanted = [jax.grad(loss)(params, b) for b in batches]
  for name, update in updates.items():
    mean = (wanted[0][name] + wanted[1][name]) / 2
    worst = float(jnp.abs(update - mean).max() / jnp.abs(mean).max())
    assert worst < 0.02
  compiled = step.lower(params, tx.init(params), *batches).compile()
  size = sum(a.size for a in PARAMS.values())
  assert wire.compiled_bytes(compiled).total_bytes < 2 * 1.1 * size


def test_optimizer_state_may_be_sharded():
  mesh = MESHES["auto"]
  tx = jaxmotion.sharded("data", optax.adam(1e-2))
  params = place_params(mesh)
  loss = lambda params, batch: masked_loss(params, batch)[0]

  @jax.jit
  def step(params, state, batch):
    grads = jaxmotion.grad(loss)(params, batch)
    return tx.update(grads, state, params)

  batch = make_batch(mesh, 0)
  updates, _ = step(params, tx.init(params), batch)
  adam = optax.adam(1e-2)
  wanted, _ = adam.update(jax.grad(loss)(params, batch), adam.init(params))
  for name, update in updates.items():
    np.testing.assert_allclose(update, wanted[name], atol=1e-6)


def test_constraints_of_the_loss_may_name_the_workers_axis():
  mesh = MESHES["model"]

  def loss(w, x):
    x = jax.lax.with_sharding_constraint(
      x, NamedSharding(mesh, P("data", None))
    )
    h = jax.lax.with_sharding_constraint(
      x @ w, NamedSharding(mesh, P("data", "model"))
    )
    return jnp.mean(h**2)

  w = put(mesh, jnp.eye(8), None, "model")
  x = put(mesh, jnp.ones((8, 8)), "data")
  value, g = jax.jit(
    lambda w, x: jax.tree.map(
      lambda g: getattr(g, "value", g), jaxmotion.value_and_grad(loss)(w, x)
    )
  )(w, x)
  wanted, whole = jax.value_and_grad(loss)(w, x)
  assert float(value) == pytest.approx(float(wanted))
  np.testing.assert_allclose(g.mean(0), whole, rtol=1e-6)


def test_a_loss_may_reshard_along_the_workers_axis():
  mesh = MESHES["explicit"]

  def loss(w, x):
    return jnp.mean(jax.sharding.reshard(x @ w, P("data", None)) ** 2)

  w = put(mesh, jnp.eye(8))
  x = put(mesh, jnp.ones((8, 8)), "data")
  with jax.set_mesh(mesh):
    g = jax.jit(lambda w, x: jaxmotion.grad(loss)(w, x).value)(w, x)
    wanted = jax.grad(loss)(w, x)
  np.testing.assert_allclose(g.mean(0), wanted, rtol=1e-6)


@pytest.mark.parametrize("activate", [jax.nn.relu, jax.nn.silu, jax.nn.softmax])
def test_explicit_axes_take_functions_with_derivatives_of_their_own(activate):
  mesh = MESHES["explicit"]
  loss = lambda w, x: jnp.mean(activate(x @ w - 0.1) ** 2)
  w = put(mesh, jnp.asarray(RNG.normal(size=(6, 8)), "float32"))
  x = put(mesh, jnp.asarray(RNG.normal(size=(8, 6)), "float32"), "data")
  with jax.set_mesh(mesh):
    g = jax.jit(lambda w, x: jaxmotion.grad(loss)(w, x).value)(w, x)
    wanted = jax.grad(loss)(w, x)
  np.testing.assert_allclose(g.mean(0), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape, names", [((4,), "d"), ((4, 2), "dm")])
def test_explicit_axes_take_a_batch_that_is_not_divided(shape, names):
  mesh = jax.make_mesh(
    shape,
    tuple(names),
    axis_types=(AxisType.Explicit,) * len(names),
    devices=DEVICES[: math.prod(shape)],
  )
  model = "m" if "m" in names else None
  x = jnp.asarray(RNG.normal(size=(8, 6)), "float32")
  loss = lambda w, x: jnp.mean(jnp.sort(x, 0) * jnp.tanh(x * w[None]))
  wanted = jax.grad(loss)(jnp.ones(6), x)
  with jax.set_mesh(mesh):
    w = jax.device_put(jnp.ones(6), P(model))
    x = jax.device_put(x, P(None, model))
    g = jax.jit(lambda w, x: jaxmotion.grad(loss, axis_name="d")(w, x).value)(
      w, x
    )
  np.testing.assert_allclose(g.mean(0), wanted, rtol=1e-5, atol=1e-7)


def map_matmul(mesh, axis_name, in_specs, out_specs, reduce=lambda y: y):
  """A loss whose matrix product is a map over one axis of the mesh."""
  matmul = jax.shard_map(
    lambda x, w: reduce(x @ w),
    mesh=mesh,
    in_specs=in_specs,
    out_specs=out_specs,
    axis_names={axis_name},
  )
  return lambda w, x: jnp.mean(jnp.tanh(matmul(x, w)) ** 2)


def test_a_loss_may_map_over_axes_of_a_model():
  mesh = MESHES["model"]
  loss_fn = map_matmul(
    mesh,
    "model",
    (P(None, "model"), P("model")),
    P(),
    lambda y: jax.lax.psum(y, "model"),
  )
  # A replicated parameter, whose gradient the devices of a model have parts of.
  w = put(mesh, PARAMS["hidden"][:, :3])
  x = put(mesh, RNG.normal(size=(16, 64)), "data")
  tx = jaxmotion.exchange("data", codecs.uniform(bits=8))

  @jax.jit
  def exchanged(w, x):
    loss, grads = jaxmotion.value_and_grad(loss_fn)(w, x)
    return loss, tx.update(grads, tx.init(w))[0]

  loss, grads = exchanged(w, x)
  expected_loss, expected = jax.jit(jax.value_and_grad(loss_fn))(w, x)
  np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
  most = np.abs(expected).max()
  np.testing.assert_allclose(grads, expected, atol=most / 64)


def test_a_loss_that_maps_over_the_workers_is_refused():
  mesh = MESHES["auto"]
  loss_fn = map_matmul(mesh, "data", (P("data"), P()), P("data"))
  x = put(mesh, np.ones((8, 64), "f"), "data")
  with pytest.raises(ValueError, match="`fun` must hold no `jax.shard_map`"):
    jaxmotion.value_and_grad(loss_fn)(PARAMS["hidden"], x)


def own_gradient(read):
  def step(w, x):
    return read(jaxmotion.grad(lambda w, x: jnp.mean(x * w))(w, x))

  with jax.set_mesh(MESHES["auto"]):
    return jax.jit(step)(jnp.ones((1, 3)), jnp.ones((8, 3)))


def test_an_unsummed_gradient_is_not_read():
  with pytest.raises(AttributeError, match="jaxmotion.exchange"):
    own_gradient(optax.tree.norm)
  with pytest.raises(TypeError, match="which `jaxmotion.exchange` sums first"):
    own_gradient(jnp.sum)
  with pytest.raises(TypeError, match="UnsummedGradient"):
    own_gradient(lambda g: g * g)


def test_an_unsummed_gradient_is_scaled():
  np.testing.assert_array_equal(
    own_gradient(lambda g: (2 * g / 4 + -g).value),
    -own_gradient(lambda g: g.value) / 2,
  )


def exchange_of(grads, axis_name="data"):
  tx = transforms.exchange(axis_name)
  with jax.set_mesh(MESHES["auto"]):
    params = {"a": jnp.ones((1, 3)), "b": jnp.ones((1, 3))}
    loss = lambda p, x: jnp.mean(x * p["a"] + p["b"])
    step = lambda p, x: tx.update(grads(loss, p, x), tx.init(p))
    return jax.jit(step)(params, jnp.ones((8, 3)))


def test_gradients_that_are_summed_already_are_named():
  def mixed(loss, p, x):
    own = jaxmotion.grad(loss)(p, x)
    return own | {"b": jax.grad(loss)(p, x)["b"]}

  with pytest.raises(ValueError, match=r"`updates/b` .*got float32\[1,3\]"):
    exchange_of(mixed)


def test_plain_gradients_outside_of_a_map_name_the_cure():
  with pytest.raises(ValueError, match=r"jaxmotion\.value_and_grad"):
    exchange_of(lambda loss, p, x: jax.grad(loss)(p, x))


def test_gradients_of_another_axis_are_refused():
  with pytest.raises(ValueError, match="`axis_name`"):
    exchange_of(
      lambda loss, p, x: jaxmotion.grad(loss, axis_name="model")(p, x)
    )


def test_arguments_that_are_no_arrays_stay_what_they_are():
  def loss(w, x, act, train, scale=1):
    assert train is True and scale == 2  # Neither is traced.
    return jnp.mean(act(x * w)) * scale

  w, x = jnp.ones((1, 3)), jnp.linspace(0.0, 1.0, 24).reshape(8, 3)
  with jax.set_mesh(MESHES["auto"]):
    step = lambda w, x: jaxmotion.value_and_grad(loss)(
      w, x, jnp.tanh, True, scale=2
    )[0]
    value = jax.jit(step)(w, x)
  assert float(value) == pytest.approx(float(loss(w, x, jnp.tanh, True, 2)))


@pytest.mark.parametrize(
  "other, got", [(jnp.tanh, "tanh"), (jnp.arange(3), r"int32\[3\]")]
)
def test_what_has_no_gradient_is_named(other, got):
  params = {"w": jnp.ones(3), "other": other}
  with pytest.raises(TypeError, match=rf"got .*{got}.* at '0/other': .*eqx\."):
    jaxmotion.grad(lambda p, x: jnp.sum(p["w"] * x))(params, jnp.ones((4, 3)))


def test_parameters_sharded_over_workers_are_refused():
  mesh = MESHES["auto"]
  params = {"w": put(mesh, jnp.ones(8), "data")}
  tx = jaxmotion.exchange("data")
  loss = lambda p, x: jnp.sum(p["w"] * x)
  for call in (
    lambda: tx.init(params),
    lambda: jaxmotion.grad(loss)(params, jnp.ones((4, 8))),
  ):
    with pytest.raises(ValueError, match="at '.*w'.*jaxmotion.fully_sharded"):
      call()


def test_an_exchange_belongs_inside_of_lookahead():
  params = put(MESHES["auto"], jnp.ones(3))
  inner = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  optax.lookahead(inner, 2, 0.5).init(
    pair := optax.LookaheadParams.init_synced(params)
  )
  tx = optax.chain(jaxmotion.exchange("data"), optax.lookahead(inner, 2, 0.5))
  with pytest.raises(TypeError, match="the pair of `optax.lookahead`"):
    tx.init(pair)


def test_a_loss_that_is_no_scalar_is_refused():
  with jax.set_mesh(MESHES["auto"]):
    with pytest.raises(TypeError, match="`fun` must return a scalar"):
      jaxmotion.grad(lambda w, x: x * w)(jnp.ones(8), jnp.ones(8))
    with pytest.raises(TypeError, match="`fun` must return a pair"):
      jaxmotion.grad(lambda w, x: jnp.sum(w), has_aux=True)(1.0, jnp.ones(8))


def test_a_batch_that_the_loss_closes_over_is_divided():
  mesh = MESHES["auto"]
  x = put(mesh, np.ones((256, 64), "float32"), "data")
  w = put(mesh, np.ones((64, 64), "float32"))

  def count_flops(find_grads):
    with jax.set_mesh(mesh):
      compiled = jax.jit(find_grads).lower(w, x).compile()
    return compiled.cost_analysis()["flops"]

  def as_argument(w, x):
    loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w))
    return jaxmotion.grad(loss_fn)(w, x).value

  def closed_over(w, x):
    return jaxmotion.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w).value

  assert count_flops(closed_over) == count_flops(as_argument)
  np.testing.assert_array_equal(
    *(jax.jit(f)(w, x) for f in (closed_over, as_argument))
  )


def test_lookups_in_rows_that_a_model_divides_are_as_before():
  mesh = jax.sharding.Mesh(DEVICES.reshape(2, 2, 2), ("data", "fsdp", "model"))
  batch = NamedSharding(mesh, P(("data", "fsdp")))
  x = jax.device_put(RNG.normal(size=(8, 3, 32)).astype("float32"), batch)
  places = np.resize([0, 31, -1, 99], (8, 3, 1))
  places = jax.device_put(places, batch)

  def loss_fn(scale, x, places):
    logits = jax.lax.with_sharding_constraint(
      x * scale, NamedSharding(mesh, P(("data", "fsdp"), None, "model"))
    )
    picked = jnp.take_along_axis(logits, places, -1)
    return jnp.mean(picked), picked

  args = put(mesh, jnp.ones(())), x, places
  grad_fn = jaxmotion.value_and_grad(loss_fn, has_aux=True)
  own = jax.jit(lambda *args: grad_fn(*args)[0][1])(*args)
  np.testing.assert_array_equal(own, loss_fn(*args)[1])


@pytest.mark.parametrize(
  "way", ["closed over", "argument", "in a scan", "microbatches"]
)
def test_neither_gradients_nor_weights_that_stay_are_sent(way):
  mesh = MESHES["auto"]
  x = RNG.normal(size=(32, 64)).astype("float32")
  x = put(mesh, x, "data")
  w, teacher = put(mesh, [np.eye(64, dtype="float32")] * 2)

  def loss_fn(w, x, teacher):
    if way == "microbatches":
      parts = x.reshape(-1, 2, 64).swapaxes(0, 1)
      add = lambda total, part: (total + jnp.mean(jnp.tanh(part @ w)), None)
      return jax.lax.scan(jax.checkpoint(add), 0.0, parts)[0] / 2
    wanted = jnp.tanh(x @ teacher)
    if way == "in a scan":
      repeat = lambda h, _: (jnp.tanh(h @ teacher), None)
      wanted = jax.lax.scan(repeat, wanted, length=2)[0]
    return jnp.mean((x @ w - wanted) ** 2)

  @jax.jit
  def find_own(w, x, teacher):
    if way == "closed over":
      return jaxmotion.grad(lambda w, x: loss_fn(w, x, teacher))(w, x).value
    return jaxmotion.grad(loss_fn)(w, x, teacher).value

  compiled = find_own.lower(w, x, teacher).compile()
  assert wire.compiled_bytes(compiled).total_bytes < 100
  own = np.mean(compiled(w, x, teacher), axis=0)
  wanted = jax.jit(jax.grad(loss_fn))(w, x, teacher)
  np.testing.assert_allclose(own, wanted, atol=1e-7)


def test_a_codec_changes_the_bytes_of_the_workers_axis_alone():
  mesh = jax.sharding.Mesh(DEVICES.reshape(2, 2, 2), ("data", "fsdp", "model"))
  specs = {"table": P("model", "fsdp"), "up": P("fsdp", "model")}
  shapes = {"table": (64, 128), "up": (128, 256)}
  params = {
    name: jax.device_put(
      RNG.normal(size=shape).astype("float32"), NamedSharding(mesh, specs[name])
    )
    for name, shape in shapes.items()
  }
  tokens = put(mesh, RNG.integers(0, 64, (8, 4)), ("data", "fsdp"))

  def loss_fn(params, tokens):
    h = jnp.tanh(jnp.take(params["table"], tokens, axis=0) @ params["up"])
    return jnp.mean(jax.nn.logsumexp(h, -1))

  def count_bytes(codec):
    tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1))

    @jax.jit
    def step(params, opt_state):
      grads = jaxmotion.grad(loss_fn)(params, tokens)
      return tx.update(grads, opt_state, params)

    compiled = step.lower(params, tx.init(params)).compile()
    counted = collections.Counter()
    for move in wire.compiled_bytes(compiled, mesh=mesh).moves:
      counted[move.axes] += wire.Ledger((move,)).total_bytes
    return counted.pop(("data",)), counted

  whole, others = count_bytes(codecs.identity())
  encoded, same = count_bytes(codecs.uniform(bits=8, block=64))
  # A byte for each element, and four for each block; some bytes of the loss.
  np.testing.assert_allclose(encoded / whole, (1 + 4 / 64) / 4, rtol=0.03)
  assert same == others


# Chains whose parts see each worker's own gradient.
OWN = {
  "per_worker": optax.chain(
    jaxmotion.per_worker(optax.trace(0.5), "data"),
    jaxmotion.exchange("data", INT8),
    optax.sgd(0.1),
  ),
  "skip_nonfinite": jaxmotion.skip_nonfinite(
    optax.chain(jaxmotion.exchange("data", INT8), optax.adam(0.1)), "data"
  ),
  "delayed": jaxmotion.delayed(
    optax.chain(jaxmotion.exchange("data", INT8), optax.sgd(0.1))
  ),
}


@pytest.mark.parametrize("kind", OWN)
def test_wrappers_see_the_gradients_of_each_worker(kind):
  mesh, tx = MESHES["auto"], OWN[kind]
  loss_fn = lambda w, x: jnp.mean((x @ w - 1) ** 2)
  batch = jax.device_put(
    RNG.normal(size=(8, 6)).astype("float32"), NamedSharding(mesh, P("data"))
  )
  params = jax.device_put(np.ones((6, 2), "float32"), NamedSharding(mesh, P()))

  @jax.jit
  def step(params, opt_state, batch):
    loss, grads = jaxmotion.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  init, made_step = jaxmotion.make_train_step(loss_fn, tx, mesh)
  made, found = init(params), (params, tx.init(params))
  for _ in range(3):
    made, _ = made_step(made, batch)
    *found, _ = step(*found, batch)
  for a, b in zip(
    *map(jax.tree.leaves, (found, [made.params, made.opt_state])), strict=True
  ):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  "codec", [codecs.uniform(bits=4), codecs.topk(density=0.01)]
)
def test_steps_are_lowered_for_gpus(codec):
  gpu = AbstractDevice("NVIDIA H200", None, "gpu")
  mesh = AbstractMesh(
    (4,), ("data",), axis_types=(AxisType.Auto,), abstract_device=gpu
  )
  tx = jaxmotion.exchange("data", codecs.feedback(codec))

  def step(w, state, x):
    grads = jaxmotion.grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)
    return tx.update(grads, state, w)

  w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
  state = transforms.extend.trace_state(tx, w, mesh, "data")
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(step).trace(w, state, w)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert "@__gpu$xla.gpu.triton(" in text


LAYERS = 3
STACKED = {
  "bias": P(),
  "embedding": P("data"),
  "layers": P(None, None, "data"),
  "scale": P(),
}


def stacked_loss(params, batch, dtype):
  """Layers in a scan over floats of a type, each computed again backward."""
  x = params["embedding"][batch["x"]].astype(dtype)

  @jax.checkpoint
  def apply(x, layer):
    scale = params["scale"].astype(x.dtype)
    return x + jnp.tanh(x @ layer.astype(x.dtype)) * scale, None

  x, _ = jax.lax.scan(apply, x, params["layers"])
  x = x.astype(jnp.float32) + params["bias"]
  logits = x @ params["embedding"].T
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
  tokens = jnp.sum(batch["mask"])
  return jnp.sum(losses * batch["mask"]) / tokens, {"tokens": tokens}


@functools.cache
def train_shards(codec, dtype="float32"):
  """(losses, parameters, bytes); codec None: plain JAX."""
  mesh, rng = MESHES["auto"], np.random.default_rng(0)
  draw = lambda *shape: rng.normal(size=shape).astype("float32") / 8
  params = {
    "bias": np.zeros((1, 1, 64), "float32"),
    "embedding": draw(32, 64),
    "layers": draw(LAYERS, 64, 64),
    "scale": np.ones((1, 1, 64), "float32"),
  }
  params = {
    name: jax.device_put(a, NamedSharding(mesh, STACKED[name]))
    for name, a in params.items()
  }
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
  differentiate = jax.value_and_grad
  if codec is not None:
    differentiate = functools.partial(
      jaxmotion.value_and_grad,
      specs=STACKED,
      weight_codec=codec,
      gradient_codec=codec,
    )

  @jax.jit
  def step(params, state, batch):
    loss_fn = functools.partial(stacked_loss, dtype=dtype)
    (loss, aux), grads = differentiate(loss_fn, has_aux=True)(params, batch)
    updates, state = tx.update(grads, state, params)
    norm = optax.tree.norm(grads)
    return optax.apply_updates(params, updates), state, (loss, aux, norm)

  state, seen = tx.init(params), []
  for i in range(4):
    params, state, logged = step(params, state, batch := make_batch(mesh, i))
    seen.append([float(x) for x in jax.tree.leaves(logged)])
  compiled = step.lower(params, state, batch).compile()
  sent = wire.compiled_bytes(compiled).total_bytes
  return seen, jax.device_get(params), sent


def test_a_trainer_of_shards_logs_what_it_logged_and_sends_less():
  wanted, params, plain = train_shards(None)
  seen, own, full = train_shards(codecs.identity())
  np.testing.assert_allclose(seen, wanted, rtol=2e-6)
  for a, b in zip(*map(jax.tree.leaves, (own, params)), strict=True):
    np.testing.assert_allclose(a, b, atol=3e-6 * np.abs(b).max())
  near, _, sent = train_shards(codecs.uniform(bits=8))
  np.testing.assert_allclose(near, wanted, rtol=0.05)
  # Scales, and the two arrays that all workers hold, are the rest.
  assert 3.7 * sent < full < plain
  page = (ROOT / "docs" / "sharded.md").read_text()
  assert f"{full:,.0f}" in page and f"{sent:,.0f}" in page
  # A cast does not keep weights from their codec.
  _, _, half = train_shards(codecs.uniform(bits=8), "bfloat16")
  assert half == sent


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"specs": P()}, "`specs` must shard a parameter over 'data', got none"),
    ({"specs": P("model")}, "`specs` must shard a parameter over 'data'"),
    (
      {"specs": P(("data", "model"))},
      r"`specs` must shard one dimension over 'data' alone.*float32\[8,6\]",
    ),
    ({"specs": P(None, "data")}, "which 4 workers divide, got .*'data'"),
    ({"specs": {"v": P()}}, "`specs` must be a PartitionSpec or a tree of"),
  ],
)
def test_specs_of_shards_that_do_not_fit_are_refused(options, message):
  w = {"w": jnp.ones((8, 6))}
  loss_fn = lambda w, x: jnp.mean(x @ w["w"])
  with jax.set_mesh(MESHES["model"]):
    step = jaxmotion.value_and_grad(loss_fn, **options)
    with pytest.raises(ValueError, match=message):
      jax.jit(step).trace(w, jnp.ones((4, 8)))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_workers_share_out_shards_of_a_model(kind):
  mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
  specs, rng = {"b": P(), "w": P("data", "model")}, np.random.default_rng(0)
  params = {"b": jnp.zeros((1, 16)), "w": rng.normal(size=(8, 16))}
  x = rng.normal(size=(16, 8)).astype("float32")

  def loss_fn(params, x, **options):
    h = jnp.dot(x, params["w"].astype("float32"), **options)
    return jnp.mean(jnp.tanh(h + params["b"]) ** 2)

  wanted = jax.grad(loss_fn)(params, x)
  place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
  params = jax.tree.map(place, params, specs)
  out = {} if kind == AxisType.Auto else {"out_sharding": P("data", "model")}
  for codec, tolerance in ((None, 2e-6), (codecs.uniform(bits=8), 0.05)):
    grad_fn = jaxmotion.value_and_grad(
      functools.partial(loss_fn, **out),
      specs=specs,
      weight_codec=codec,
      gradient_codec=codec,
    )
    with jax.set_mesh(mesh):
      _, grads = jax.jit(grad_fn)(params, place(x, P("data")))
    assert grads["w"].sharding.spec == specs["w"]
    for name, own in grads.items():
      scale = tolerance * np.abs(wanted[name]).max()
      np.testing.assert_allclose(own, wanted[name], rtol=0, atol=scale)
