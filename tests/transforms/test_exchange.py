import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, wire
from jaxmotion.testing import check_transform
from tests.compilations import compilations
from tests.transforms import helpers
from tests.transforms.helpers import bits

WORKERS = 4
MESH = Mesh(np.array(jax.devices()[:WORKERS]), ("data",))
RNG = np.random.default_rng(0)
PARAMS = {
  "dense": {
    "kernel": jnp.asarray(RNG.normal(size=(16, 32)).astype(np.float32)),
    "bias": jnp.zeros(32),
  },
  "out": {"kernel": jnp.asarray(RNG.normal(size=(32, 4)), jnp.float32)},
}
BATCH = (
  jnp.asarray(RNG.normal(size=(WORKERS * 8, 16)).astype(np.float32)),
  jnp.asarray(RNG.normal(size=(WORKERS * 8, 4)).astype(np.float32)),
)
INT4 = codecs.feedback(codecs.uniform(bits=4, rounding="stochastic"))


def loss_fn(params, batch):
  x, y = batch
  h = jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"][None])
  return jnp.mean((h @ params["out"]["kernel"] - y) ** 2)


def train(tx, params=PARAMS, steps=4, batch=BATCH, loss=loss_fn, **extra):
  return helpers.train(loss, tx, MESH, params, batch, steps=steps, **extra)


def pmean_transform():
  def update(updates, state, params=None):
    return jax.tree.map(lambda g: lax.pmean(g, "data"), updates), state

  return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def test_identity_trains_as_pmean_does_bit_for_bit():
  ours, _, _ = train(optax.chain(jaxmotion.exchange("data"), optax.adamw(0.01)))
  uncompressed, _, _ = train(optax.chain(pmean_transform(), optax.adamw(0.01)))
  assert bits(ours) == bits(uncompressed)


@pytest.mark.parametrize(
  "tx",
  [
    optax.chain(
      optax.clip(1.0), jaxmotion.exchange("data", INT4), optax.adam(1e-2)
    ),
    optax.chain(
      jaxmotion.exchange("data", codecs.sign(), method="two_phase"),
      optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
    ),
    optax.inject_hyperparams(
      lambda learning_rate: optax.chain(
        jaxmotion.exchange("data", INT4), optax.sgd(learning_rate)
      )
    )(learning_rate=0.1),
    optax.chain(
      optax.masked(
        jaxmotion.exchange("data", INT4),
        {"dense": {"kernel": True, "bias": False}, "out": {"kernel": True}},
      ),
      optax.masked(
        jaxmotion.exchange("data"),
        {"dense": {"kernel": False, "bias": True}, "out": {"kernel": False}},
      ),
      optax.sgd(0.1),
    ),
    optax.partition(
      {
        "small": optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1)),
        "large": optax.chain(
          jaxmotion.exchange("data", INT4), optax.adam(1e-2)
        ),
      },
      {"dense": {"kernel": "large", "bias": "small"}, "out": "large"},
    ),
    jaxmotion.skip_nonfinite(
      optax.chain(jaxmotion.exchange("data", INT4), optax.adam(1e-2)), "data"
    ),
    optax.chain(
      jaxmotion.exchange(
        "data",
        codecs.rules(
          [("bias", codecs.identity()), ("kernel", codecs.buckets(INT4))]
        ),
        nonfinite="skip",
      ),
      optax.lion(1e-3),
    ),
  ],
  ids=[
    "clip_adam",
    "two_phase_schedule",
    "inject_hyperparams",
    "masked",
    "partition",
    "skip_nonfinite",
    "rules_buckets",
  ],
)
def test_properties_hold_in_any_optax_chain(tx):
  check_transform(tx, MESH, PARAMS)


def test_a_compressed_run_learns():
  tx = optax.chain(jaxmotion.exchange("data", INT4), optax.adam(3e-2))
  _, _, losses = train(tx, steps=60)
  _, _, plain = train(
    optax.chain(jaxmotion.exchange("data"), optax.adam(3e-2)), steps=60
  )
  assert losses[-1] < 0.5 * losses[0]
  assert losses[-1] < plain[-1] + 0.05 * losses[0]


def test_no_float_all_reduce_of_gradients_is_left_in_a_compressed_step():
  tx = optax.chain(jaxmotion.exchange("data", INT4), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH)
  state = init(PARAMS)
  traced = wire.step_bytes(step, state, BATCH)
  compiled = wire.compiled_bytes(step.lower(state, BATCH).compile())
  for ledger in (traced, compiled):
    floats = [m for m in ledger.moves if m.dtype.startswith(("f", "bf"))]
    assert sum(m.payload_bytes * m.count for m in floats) == 4  # the loss
  assert traced.total_bytes == compiled.total_bytes


def test_random_bits_depend_on_seed_step_path_and_worker_alone():
  def run(seed, params=PARAMS):
    tx = optax.chain(
      jaxmotion.exchange("data", INT4, seed=seed), optax.sgd(0.1)
    )
    return train(tx, params=params, steps=2)[0]

  first = bits(run(0))
  assert bits(run(0)) == first
  assert bits(run(1)) != first
  # A leaf that joins before the others changes none of their bits.
  more = {"another": jnp.ones(3), **PARAMS}
  again = run(0, more)
  again.pop("another")
  assert bits(again) == first


def test_narrow_gradients_keep_their_dtype_and_wide_error_memory():
  params = jax.tree.map(lambda a: a.astype("bfloat16"), PARAMS)
  tx = optax.chain(jaxmotion.exchange("data", INT4), optax.sgd(0.1))
  out, state, _ = train(tx, params=params, steps=1)
  assert {a.dtype.name for a in jax.tree.leaves(out)} == {"bfloat16"}
  states = state[0].codec_state
  assert {s.first.memory.value.dtype.name for s in states.value} == {"float32"}
  assert {a.shape[0] for a in jax.tree.leaves(states)} == {WORKERS}


def test_error_memory_differs_between_workers_and_is_marked_so():
  tx = optax.chain(jaxmotion.exchange("data", INT4), optax.sgd(0.1))
  _, state, _ = train(tx)
  for leaf in jax.tree.leaves(state[0].codec_state):
    assert leaf.sharding.spec == P("data")
  for array in state[0].codec_state.value:
    value = np.asarray(array.first.memory.value)
    assert len({bits(row)[0] for row in value}) == WORKERS


def test_flax_linen_parameters():
  model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(4)])
  params = model.init(jax.random.key(0), BATCH[0])

  def loss(params, batch):
    return jnp.mean((model.apply(params, batch[0]) - batch[1]) ** 2)

  tx = optax.chain(
    jaxmotion.exchange(
      "data", codecs.rules([("kernel$", INT4), ("bias$", codecs.identity())])
    ),
    optax.adam(1e-2),
  )
  with jax.numpy_rank_promotion("allow"):
    _, _, losses = train(tx, params=params, loss=loss, steps=20)
  assert losses[-1] < losses[0]


def test_flax_nnx_parameters():
  model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
  graph, params = nnx.split(model, nnx.Param)

  def loss(params, batch):
    return jnp.mean((nnx.merge(graph, params)(batch[0]) - batch[1]) ** 2)

  tx = optax.chain(
    jaxmotion.exchange(
      "data", codecs.rules([("kernel", INT4), ("bias", codecs.identity())])
    ),
    optax.adam(1e-2),
  )
  with jax.numpy_rank_promotion("allow"):
    out, _, losses = train(tx, params=params, loss=loss, steps=20)
  assert losses[-1] < losses[0]
  assert isinstance(out, nnx.State)


@pytest.mark.parametrize("kind", ["pmap", "vmap"])
def test_other_maps_train_as_shard_map_does(kind):
  codec = codecs.feedback(codecs.uniform(bits=4))
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1))
  if kind == "pmap":
    bind = functools.partial(
      jax.pmap, axis_name="data", devices=jax.devices()[:WORKERS]
    )
  else:
    bind = lambda f: jax.jit(jax.vmap(f, axis_name="data"))
  state = bind(lambda _: tx.init(PARAMS))(jnp.arange(WORKERS))

  def step(params, state, batch):
    grads = jax.grad(loss_fn)(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  step = bind(step)
  params = jax.tree.map(lambda a: jnp.stack([a] * WORKERS), PARAMS)
  split = jax.tree.map(lambda a: a.reshape(WORKERS, -1, a.shape[1]), BATCH)
  for _ in range(4):
    params, state = step(params, state, split)
  ours, _, _ = train(tx)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(ours), strict=True):
    assert len({bits(row)[0] for row in np.asarray(a)}) == 1
    np.testing.assert_allclose(a[0], b, rtol=1e-4, atol=1e-5)


def test_accumulation_goes_around_the_exchange():
  inner = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
  chain = optax.chain(jaxmotion.exchange("data", INT4), inner)
  check_transform(chain, MESH, PARAMS)


def test_one_program_serves_every_level():
  levels = [codecs.feedback(codecs.uniform(bits=b)) for b in (2, 8)]
  tx = optax.chain(jaxmotion.exchange("data", levels), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH)
  errors, compiled = [], []
  for level in (jnp.int32(0), jnp.int32(1)):
    state = init(PARAMS)
    before = compilations()
    state, _ = step(state, BATCH, level=level)
    compiled.append(compilations() - before)
    states = state.opt_state[0].codec_state.value
    errors.append(
      max(float(jnp.abs(s.first.memory.value).max()) for s in states)
    )
  assert errors[0] > 10 * errors[1]
  assert compiled == [1, 0]


def test_the_first_updates_are_plain_and_leave_error_memory_alone():
  tx = optax.chain(jaxmotion.exchange("data", INT4, start=2), optax.sgd(0.1))
  plain = optax.chain(pmean_transform(), optax.sgd(0.1))
  ours, state, _ = train(tx, steps=2)
  assert bits(ours) == bits(train(plain, steps=2)[0])
  assert not any(
    np.asarray(a).any() for a in jax.tree.leaves(state[0].codec_state)
  )
  later, state, _ = train(tx, steps=3)
  assert bits(later) != bits(train(plain, steps=3)[0])
  for reduced in state[0].codec_state.value:
    assert (np.asarray(reduced.first.memory.count) == 1).all()


def test_a_schedule_chooses_the_level_of_each_update():
  codec = [codecs.identity(), codecs.uniform(bits=2)]
  tx = jaxmotion.exchange("data", codec, schedule=lambda count: count // 2)
  plain = optax.chain(pmean_transform(), optax.sgd(0.1))
  scheduled = optax.chain(tx, optax.sgd(0.1))
  assert bits(train(scheduled, steps=2)[0]) == bits(train(plain, steps=2)[0])
  assert bits(train(scheduled, steps=3)[0]) != bits(train(plain, steps=3)[0])
  with pytest.raises(ValueError, match="`level` must not be given to `update`"):
    train(scheduled, level=1)


def test_weights_make_the_mean_exact_for_uneven_shares():
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))

  def update(grads, weights):
    state = tx.init({"g": grads[0]})
    index = lax.axis_index("data")
    mean, _ = tx.update({"g": grads[0]}, state, weight=weights[index])
    return mean["g"]

  grads = jnp.asarray(RNG.normal(size=(WORKERS, 5)).astype(np.float32))
  weights = jnp.array([1.0, 2.0, 3.0, 4.0])
  mean = jax.jit(
    jax.shard_map(update, mesh=MESH, in_specs=(P("data"), P()), out_specs=P())
  )(grads, weights)
  np.testing.assert_allclose(mean, -0.1 * (weights / 10) @ grads, rtol=1e-5)


@pytest.mark.parametrize(
  ("make", "error", "message"),
  [
    (
      lambda: jaxmotion.exchange("data", "int8"),
      TypeError,
      r"`codec` must be a codec, such as .*bits=8.* got 'int8'",
    ),
    (
      lambda: train(optax.adam(0.1)),
      ValueError,
      r"`tx` must exchange .*'data'.*got `params/.*begin the chain with",
    ),
    (
      lambda: train(
        optax.chain(optax.trace(0.9), jaxmotion.exchange("data", INT4))
      ),
      ValueError,
      "`tx` must exchange .*got `opt_state/0/trace/dense/bias` that differs",
    ),
    (
      lambda: train(
        optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1)),
        batch=tuple(a[:-1] for a in BATCH),
      ),
      ValueError,
      r"`batch` must have .* 4 workers divide, got shape \(31, 16\) at `0`",
    ),
    (lambda: jaxmotion.exchange("data", []), ValueError, "`codec` must hold"),
    (
      lambda: jaxmotion.exchange("data", nonfinite="drop"),
      ValueError,
      "`nonfinite` must be one of 'propagate', 'skip', 'zero', got 'drop'",
    ),
    (
      lambda: jaxmotion.exchange("data", op="max"),
      ValueError,
      "`op` must be one of 'mean', 'sum', got 'max'",
    ),
    (
      lambda: jaxmotion.make_train_step(
        loss_fn, optax.sgd(0.1), MESH, axis_name="model"
      ),
      ValueError,
      "`axis_name` must be an axis of the mesh.*got 'model'",
    ),
    (
      lambda: jaxmotion.exchange("data", INT4).init(PARAMS),
      ValueError,
      "`axis_name` must name an axis of the enclosing shard_map or pmap, got "
      "'data': train by jaxmotion.make_train_step, or .*bind_mesh",
    ),
    (
      lambda: train(
        optax.chain(jaxmotion.exchange("data", INT4), optax.sgd(0.1)), level=1
      ),
      ValueError,
      "`level` must be given if `codec` is a sequence",
    ),
    (
      lambda: jaxmotion.exchange("data", INT4, schedule=lambda count: count),
      ValueError,
      "`schedule` must be None for one codec",
    ),
    (
      lambda: jaxmotion.exchange("data", [INT4], schedule=0),
      TypeError,
      "`schedule` must be a function",
    ),
    (
      lambda: train(optax.chain(jaxmotion.exchange("rows"), optax.sgd(0.1))),
      ValueError,
      "`axis_name` must name an axis.*got 'rows'",
    ),
  ],
)
def test_bad_arguments_are_named(make, error, message):
  with pytest.raises(error, match=message):
    make()


@pytest.mark.parametrize("own", ["", "model"])
def test_a_gradient_that_jax_has_summed_is_refused_by_name(own):
  mesh = jax.make_mesh(
    (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  tx = jaxmotion.exchange(("data", "model"))

  def local_update(w, x):
    w = lax.pcast(w, own, to="varying") if own else w
    grads = {"w": jax.grad(lambda w: jnp.sum(x @ w))(w)}
    return tx.update(grads, tx.init(grads))[0]

  with pytest.raises(ValueError, match="`updates/w` must .* of 'data'.*summed"):
    jax.shard_map(
      local_update,
      mesh=mesh,
      in_specs=(P(), P(("data", "model"))),
      out_specs=P(),
    )(jnp.ones(3), jnp.ones((4, 3)))
