"""An exchange in steps of (emulated) workers, and of maps of one's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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


def chain(codec=None, **options):
  exchange = jaxmotion.exchange("data", codec, **options)
  return optax.chain(exchange, optax.sgd(0.1))


@functools.cache
def train_plainly():
  """The parameters after each of 4 steps of the mean gradient."""
  tx = optax.chain(pmean_transform(), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH, donate=False)
  state, found = init(PARAMS), []
  for _ in range(4):
    state, _ = step(state, BATCH)
    found.append(bits(state.params))
  return found


def test_identity_trains_as_pmean_does_bit_for_bit():
  assert bits(train(chain())[0]) == train_plainly()[-1]


RULES = codecs.rules(
  [("bias", codecs.identity()), ("kernel", codecs.buckets(INT4))]
)


@pytest.mark.parametrize(
  "tx",
  [
    optax.inject_hyperparams(
      lambda learning_rate: optax.chain(
        optax.clip(1.0),
        jaxmotion.exchange("data", INT4),
        optax.MultiSteps(optax.adam(learning_rate), every_k_schedule=2),
      )
    )(learning_rate=0.1),
    optax.partition(
      {
        "small": optax.chain(
          jaxmotion.exchange("data", codecs.sign(), method="two_phase"),
          optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
        ),
        "large": chain(INT4),
      },
      {"dense": {"kernel": "large", "bias": "small"}, "out": "large"},
    ),
    jaxmotion.skip_nonfinite(
      optax.chain(
        jaxmotion.exchange("data", RULES, nonfinite="skip"), optax.lion(1e-3)
      ),
      "data",
    ),
  ],
  ids=["clip_inject_accumulate", "partition_two_phase", "skip_rules_buckets"],
)
def test_properties_hold_in_any_optax_chain(tx):
  check_transform(tx, MESH, PARAMS)


@functools.cache
def make_coded(seed=0):
  tx = chain(INT4, seed=seed)
  return jaxmotion.make_train_step(loss_fn, tx, MESH, donate=False)


@functools.cache
def train_coded(seed=0):
  """The state after 2 steps."""
  init, step = make_coded(seed)
  return step(step(init(PARAMS), BATCH)[0], BATCH)[0]


def test_no_float_all_reduce_of_gradients_is_left_in_a_compressed_step():
  _, step = make_coded()
  traced = wire.step_bytes(step, train_coded(), BATCH)
  compiled = wire.compiled_bytes(step.lower(train_coded(), BATCH).compile())
  for ledger in (traced, compiled):
    floats = [m for m in ledger.moves if m.dtype.startswith(("f", "bf"))]
    assert sum(m.payload_bytes * m.count for m in floats) == 4  # the loss
  assert traced.total_bytes == compiled.total_bytes


def test_random_bits_depend_on_seed_step_path_and_worker_alone():
  first = bits(train_coded().params)
  assert bits(train_coded(1).params) != first
  # A leaf that joins before the others changes none of their bits.
  more = {"another": jnp.ones(3), **PARAMS}
  again, _, _ = train(chain(INT4), more, steps=2)
  again.pop("another")
  assert bits(again) == first
  # Examples that are the same for all workers are rounded in other ways.
  init, step = make_coded()
  same = jax.tree.map(lambda a: jnp.tile(a[:8], (WORKERS, 1)), BATCH)
  start = init(PARAMS)
  state, _ = step(start, same)
  for reduced in state.opt_state[0].codec_state.value:
    words = np.asarray(reduced.first.memory.sent.words)
    assert len({bits(row)[0] for row in words}) == WORKERS
  exchanged, *rest = start.opt_state
  exchanged = exchanged._replace(count=exchanged.count + 1)
  later, _ = step(start._replace(opt_state=(exchanged, *rest)), same)
  assert bits(later.params) != bits(state.params)


def test_narrow_gradients_keep_their_dtype_and_wide_error_memory():
  params = jax.tree.map(lambda a: a.astype("bfloat16"), PARAMS)
  out, state, _ = train(chain(INT4), params, steps=1)
  assert {a.dtype.name for a in jax.tree.leaves(out)} == {"bfloat16"}
  states = state[0].codec_state
  assert {s.first.memory.value.dtype.name for s in states.value} == {"float32"}
  assert {a.shape[0] for a in jax.tree.leaves(states)} == {WORKERS}


def test_error_memory_differs_between_workers_and_is_marked_so():
  states = train_coded().opt_state[0].codec_state
  for leaf in jax.tree.leaves(states):
    assert leaf.sharding.spec == P("data")
  for array in states.value:
    value = np.asarray(array.first.memory.value)
    assert len({bits(row)[0] for row in value}) == WORKERS


@pytest.mark.parametrize("kind", ["pmap", "vmap"])
def test_other_maps_train_as_shard_map_does(kind):
  tx = chain(codecs.feedback(codecs.uniform(bits=4)))
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
  for _ in range(2):
    params, state = step(params, state, split)
  ours, _, _ = train(tx, steps=2)
  for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(ours), strict=True):
    assert len({bits(row)[0] for row in np.asarray(a)}) == 1
    np.testing.assert_allclose(a[0], b, rtol=1e-4, atol=1e-5)


def test_one_program_serves_every_level():
  levels = [codecs.feedback(codecs.uniform(bits=b)) for b in (2, 8)]
  init, step = jaxmotion.make_train_step(loss_fn, chain(levels), MESH)
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


LEVELS = [codecs.identity(), codecs.uniform(bits=2)]
CHOOSE = lambda count: count // 2


@pytest.mark.parametrize(
  ("tx", "remembers"),
  [(chain(INT4, start=2), True), (chain(LEVELS, schedule=CHOOSE), False)],
  ids=["start", "schedule"],
)
def test_the_first_updates_are_plain_and_later_ones_coded(tx, remembers):
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH, donate=False)
  state = init(PARAMS)
  for expected in train_plainly()[:2]:
    state, _ = step(state, BATCH)
    assert bits(state.params) == expected
  later, _ = step(state, BATCH)
  assert bits(later.params) != train_plainly()[2]
  # What is sent in full leaves error memory alone.
  for one, is_set in ((state, False), (later, remembers)):
    memory = jax.tree.leaves(one.opt_state[0].codec_state)
    assert any(np.asarray(a).any() for a in memory) == is_set


REFUSED = {
  r"`codec` must be a codec, such as .*bits=8.* got 'int8'": lambda: chain(
    "int8"
  ),
  "`codec` must hold": lambda: chain([]),
  "`nonfinite` must be one of 'propagate', 'skip', 'zero', got 'd": lambda: (
    chain(nonfinite="drop")
  ),
  "`schedule` must be None for one codec": lambda: chain(INT4, schedule=max),
  "`schedule` must be a function": lambda: chain([INT4], schedule=0),
  r"`tx` must exchange .*'data'.*got `params/.*begin the chain with": lambda: (
    train(optax.adam(0.1))
  ),
  "`tx` must exchange .* `opt_state/0/trace/dense/bias` that diff": lambda: (
    train(optax.chain(optax.trace(0.9), chain(INT4)))
  ),
  r"`batch` must have .* 4 workers divide, got shape \(31, 16\) at `0`": (
    lambda: train(chain(), batch=tuple(a[:-1] for a in BATCH))
  ),
  "`axis_name` must name an axis of the enclosing shard_map or pmap, got "
  "'data': train by jaxmotion.make_train_step, or .*bind_mesh": lambda: chain(
    INT4
  ).init(PARAMS),
  "`axis_name` must name an axis.*got 'rows'": lambda: train(
    jaxmotion.exchange("rows")
  ),
  "`level` must not be given to `update`": lambda: train(
    chain(LEVELS, schedule=CHOOSE), level=1
  ),
  "`level` must be given if `codec` is a sequence": lambda: train(
    chain(INT4), level=1
  ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named(message):
  with pytest.raises((TypeError, ValueError), match=message):
    REFUSED[message]()


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


def mean_loss(w, batch):
  return jnp.mean((batch @ w - 1) ** 2)


def exchange_all(w, batch):
  """Exchanges gradients that a trainer sums by itself, by how it does."""
  summed = lambda reduce: jax.grad(
    lambda w: reduce(mean_loss(w, batch), "data")
  )(w)
  own = jax.grad(mean_loss)(w, batch)
  gradients = {
    "own": own,
    "mean of gradients": lax.pmean(own, "data"),
    "sum of gradients": lax.psum(own, "data"),
    "gradient of the mean": summed(lax.pmean),
    "gradient of the sum": summed(lax.psum),
  }
  tx = jaxmotion.exchange("data")
  return {
    name: (tx.update(g, tx.init(w))[0], lax.pmean(g, "data"))
    for name, g in gradients.items()
  }


@pytest.mark.parametrize("kind", ["shard_map", "pmap"])
def test_in_maps_without_types_it_is_the_mean_of_what_it_is_given(kind):
  w, batch = np.full((3, 2), 0.5, np.float32), BATCH[0][:8, :3]
  if kind == "pmap":
    run = jax.pmap(exchange_all, "data", in_axes=(None, 0), out_axes=None)
    found = run(w, batch.reshape(4, 2, 3))
  else:
    mapped = functools.partial(jax.shard_map, mesh=MESH, check_vma=False)
    run = mapped(exchange_all, in_specs=(P(), P("data")), out_specs=P())
    found = jax.jit(run)(w, batch)
  expected = jax.grad(mean_loss)(w, batch)
  for name, (exchanged, mean) in found.items():
    # What the trainer had without an exchange, whose mean it takes.
    np.testing.assert_array_equal(exchanged, mean)
    factor = WORKERS if "sum" in name else 1
    np.testing.assert_allclose(exchanged, factor * expected, rtol=1e-5)


# Steps and weights that are not finite on one worker.
WEIGHTS = {"w": jnp.linspace(-1, 1, 40)}
SHARP = codecs.feedback(codecs.uniform(bits=4))
GOOD = np.float32(np.random.default_rng(0).normal(size=(WORKERS, 40)))
EVEN = np.ones(WORKERS, np.float32)


def spoil(array, place, value=np.nan):
  array = array.copy()
  array[place] = value
  return array


def linear_loss(params, batch):
  return jnp.sum(params["w"] * batch["x"][0])


@functools.cache
def make_guarded(tx, weighted=False):
  weight_fn = (lambda batch: batch["weight"][0]) if weighted else None
  return jaxmotion.make_train_step(
    linear_loss, tx, MESH, weight_fn=weight_fn, donate=False
  )


def steps(tx, batches, weights=None):
  init, step = make_guarded(tx, weights is not None)
  state = init(WEIGHTS)
  for x, weight in zip(batches, weights or [EVEN] * len(batches), strict=True):
    state, _ = step(state, {"x": x, "weight": weight})
  return state.params, state.opt_state


POLICIES = {
  **{
    policy: chain(SHARP, nonfinite=policy)
    for policy in ("propagate", "skip", "zero")
  },
  "wrapped": jaxmotion.skip_nonfinite(
    optax.chain(jaxmotion.exchange("data", SHARP), optax.adam(1e-2)), "data"
  ),
}


def test_one_workers_nonfinite_gradient_leaves_the_whole_state_as_it_was():
  bad = spoil(GOOD, (2, 3), np.inf)
  p1, s1 = steps(POLICIES["wrapped"], [GOOD, GOOD])
  p2, s2 = steps(POLICIES["wrapped"], [GOOD, bad, GOOD])
  assert int(s1.skipped) == 0 and int(s2.skipped) == 1
  assert bits(p1) == bits(p2)
  assert bits(s1.inner) == bits(s2.inner)


@pytest.mark.parametrize("policy", ["skip", "zero", "propagate"])
def test_no_policy_lets_a_nonfinite_element_into_the_error_memory(policy):
  tx = POLICIES[policy]
  _, (before, _) = steps(tx, [GOOD])
  bad = spoil(GOOD, (2, 3))
  params, (after, _) = steps(tx, [GOOD, bad])
  for error in jax.tree.leaves(steps(tx, [GOOD, bad, GOOD])[1][0].codec_state):
    assert np.isfinite(np.asarray(error)).all()
  is_kept = bits(before.codec_state) == bits(after.codec_state)
  assert is_kept == (policy == "skip") == bool(int(after.skipped))
  assert bool(jnp.isfinite(params["w"]).all()) == (policy != "propagate")


def test_two_guards_agree_by_one_sum_once_compiled():
  init, step = make_guarded(jaxmotion.skip_nonfinite(POLICIES["skip"], "data"))
  args = (init(WEIGHTS), {"x": GOOD})
  traced = wire.step_bytes(step, *args).select(dtype="int32")
  compiled = wire.compiled_bytes(step.lower(*args).compile())
  assert [(m.payload_bytes, m.count) for m in traced.moves] == [(4, 2)]
  merged = compiled.select(dtype="int32").moves
  assert [(m.payload_bytes, m.count) for m in merged] == [(4, 1)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_weight_that_is_not_finite_follows_the_policy(policy):
  tx, bad = POLICIES[policy], spoil(EVEN, 1)
  before = steps(tx, [GOOD], [EVEN])
  params, after = found = steps(tx, [GOOD] * 2, [EVEN, bad])
  for error in jax.tree.leaves(steps(tx, [GOOD] * 3, [EVEN, bad, EVEN])[1]):
    assert np.isfinite(np.asarray(error, np.float64)).all()
  if policy == "propagate":
    assert np.isnan(params["w"]).all()
  elif policy == "zero":
    assert bits(found) == bits(steps(tx, [GOOD] * 2, [EVEN, spoil(EVEN, 1, 0)]))
    assert bits(params) != bits(before[0])
  else:
    assert bits(params) == bits(before[0])
    is_wrapped = policy == "wrapped"
    read = lambda s: s.inner if is_wrapped else s[0].codec_state
    assert bits(read(before[1])) == bits(read(after))
    assert int((after if is_wrapped else after[0]).skipped) == 1
