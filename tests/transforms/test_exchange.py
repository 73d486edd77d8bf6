"""An exchange in steps of (emulated) workers and hosts, and in other maps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, wire
from jaxmotion.testing import check_transform
from tests.collectives.helpers import copies
from tests.compilations import compilations
from tests.meshes import mesh_of
from tests.transforms import helpers
from tests.transforms.helpers import assert_close, bits

WORKERS, HOSTS, DEVICES = 4, 2, 2
AXES = jaxmotion.HostAxes("host", "device")
BOTH = AXES.names
MESHES = {"data": mesh_of(WORKERS), AXES: mesh_of(HOSTS, DEVICES, names=BOTH)}
MESHES[BOTH], MESH = MESHES[AXES], MESHES["data"]
RNG = np.random.default_rng(0)
PARAMS = {
  "dense": {
    "kernel": jnp.asarray(RNG.normal(size=(16, 32)).astype(np.float32)),
    "bias": jnp.zeros(32),
  }
}
BATCH = tuple(
  jnp.asarray(RNG.normal(size=(WORKERS * 8, n)).astype(np.float32))
  for n in (16, 32)
)
INT4 = codecs.feedback(codecs.uniform(bits=4, rounding="stochastic"))


def loss_fn(params, batch):
  x, y = batch
  h = jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"][None])
  return jnp.mean((h - y) ** 2)


def chain(codec=None, axes="data", tail=None, **options):
  exchange = jaxmotion.exchange(axes, codec, **options)
  return optax.chain(exchange, tail or optax.sgd(0.1))


def make(tx, axes="data", loss=loss_fn, **options):
  options |= dict(axis_name=axes, donate=False)
  return jaxmotion.make_train_step(loss, tx, MESHES[axes], **options)


def train(tx, params=PARAMS, steps=4, axes="data", batch=BATCH, **extra):
  options = dict(axis_name=axes, steps=steps, **extra)
  return helpers.train(loss_fn, tx, MESHES[axes], params, batch, **options)


@functools.cache
def train_plainly():
  """The parameters after each of 4 steps of the mean gradient."""

  def update(updates, state, params=None):
    return jax.tree.map(lambda g: lax.pmean(g, "data"), updates), state

  mean = optax.GradientTransformation(lambda _: optax.EmptyState(), update)
  init, step = make(optax.chain(mean, optax.sgd(0.1)))
  state, found = init(PARAMS), []
  for _ in range(4):
    state, _ = step(state, BATCH)
    found.append(state.params)
  return found


@pytest.mark.parametrize("axes", ["data", AXES, BOTH], ids=str)
def test_identity_trains_as_pmean_does(axes):
  params, _, _ = train(chain(axes=axes), axes=axes)
  if axes == "data":
    assert bits(params) == bits(train_plainly()[-1])
  # Four gradients of at most 1 are added in another order at each step.
  atol = 4 * 2 * WORKERS * np.finfo(np.float32).eps
  assert_close(params, train_plainly()[-1], rtol=0, atol=atol)


RULES = codecs.rules(
  [("bias", codecs.identity()), ("kernel", codecs.buckets(INT4))]
)


@pytest.mark.parametrize(
  ("tx", "axes"),
  [
    (
      optax.inject_hyperparams(
        lambda learning_rate: optax.chain(
          optax.clip(1.0),
          jaxmotion.exchange("data", INT4),
          optax.MultiSteps(optax.adam(learning_rate), every_k_schedule=2),
        )
      )(learning_rate=0.1),
      "data",
    ),
    (
      optax.partition(
        {
          "small": chain(
            codecs.sign(),
            tail=optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
            method="two_phase",
          ),
          "large": chain(INT4),
        },
        {"dense": {"kernel": "large", "bias": "small"}},
      ),
      "data",
    ),
    (
      jaxmotion.skip_nonfinite(
        chain(
          RULES, AXES, optax.lion(1e-3), method="two_phase", nonfinite="skip"
        ),
        AXES,
      ),
      AXES,
    ),
  ],
)
def test_properties_hold_in_any_optax_chain(tx, axes):
  check_transform(tx, MESHES[axes], PARAMS, axis_name=axes)


@functools.cache
def make_coded(seed=0):
  return make(chain(INT4, seed=seed))


@functools.cache
def train_coded(seed=0):
  """The state after 2 steps."""
  init, step = make_coded(seed)
  return step(step(init(PARAMS), BATCH)[0], BATCH)[0]


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


def test_error_memory_differs_between_workers_and_is_marked_so():
  states = train_coded().opt_state[0].codec_state
  for leaf in jax.tree.leaves(states):
    assert leaf.sharding.spec == P("data")
  bias, kernel = (np.asarray(s.first.memory.value) for s in states.value)
  for value in (bias, kernel):
    assert len({bits(row)[0] for row in value}) == WORKERS
  assert bias.shape == (WORKERS, 32)


def test_vmap_trains_as_shard_map_does():
  tx = chain(codecs.feedback(codecs.uniform(bits=4)))
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
  for a in jax.tree.leaves(params):
    assert len({bits(row)[0] for row in np.asarray(a)}) == 1
  first = jax.tree.map(lambda a: a[0], params)
  assert_close(first, train(tx, steps=2)[0], rtol=1e-4, atol=1e-5)


def test_one_program_serves_every_level():
  levels = [codecs.feedback(codecs.uniform(bits=b)) for b in (2, 8)]
  init, step = make(chain(levels))
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
  # JAX compiles some small functions beside the first call of a program.
  assert compiled[0] >= 1 and compiled[1] == 0
  # The codec of 8 bits changes parameters by little.
  assert_close(state.params, train_plainly()[0], rtol=0, atol=1e-3)


LEVELS = [codecs.identity(), codecs.uniform(bits=2)]
CHOOSE = lambda count: count // 2


@pytest.mark.parametrize(
  ("tx", "remembers"),
  [(chain(INT4, start=2), True), (chain(LEVELS, schedule=CHOOSE), False)],
  ids=["start", "schedule"],
)
def test_the_first_updates_are_plain_and_later_ones_coded(tx, remembers):
  init, step = make(tx)
  state = init(PARAMS)
  for expected in train_plainly()[:2]:
    state, _ = step(state, BATCH)
    assert bits(state.params) == bits(expected)
  later, _ = step(state, BATCH)
  assert bits(later.params) != bits(train_plainly()[2])
  # What is sent in full leaves error memory alone.
  for one, is_set in ((state, False), (later, remembers)):
    memory = jax.tree.leaves(one.opt_state[0].codec_state)
    assert any(np.asarray(a).any() for a in memory) == is_set


def test_one_value_names_the_workers_of_every_function():
  parts = jaxmotion.per_worker(optax.trace(0.5), AXES), chain(axes=AXES)
  tx = jaxmotion.skip_nonfinite(optax.chain(*parts), AXES)
  bound = jaxmotion.bind_mesh(tx, MESHES[AXES], axis_name=AXES)

  @jax.jit
  def step(params, opt_state, batch):
    grad_fn = jaxmotion.value_and_grad(loss_fn, axis_name=AXES)
    loss, grads = grad_fn(params, batch)
    updates, opt_state = bound.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params, state = PARAMS, bound.init(PARAMS)
  with jax.set_mesh(MESHES[AXES]):
    for _ in range(2):
      params, state, _ = step(params, state, BATCH)
  expected, held, _ = train(tx, steps=2, axes=AXES)
  assert jaxmotion.state_specs(state, AXES) == jaxmotion.state_specs(held, BOTH)
  assert_close((params, state), (expected, held), rtol=0, atol=1e-6)


def train_shapes(*args, **extra):
  """Traces a step; nothing is compiled."""
  init, step = make(*args)
  batch = extra.pop("batch", BATCH)
  step.eval_shape(jax.eval_shape(init, PARAMS), batch, **extra)


SCHEDULED = chain(LEVELS, schedule=CHOOSE)
REFUSED = {
  "`schedule` must be None for one codec": lambda: chain(INT4, schedule=max),
  "`local_codec` must be None without hosts, got feedback.*HostAxes": lambda: (
    chain(axes=BOTH, local_codec=INT4)
  ),
  r"`tx` must exchange .*'data'.*got `params/.*begin the chain with": (
    lambda: train_shapes(optax.adam(0.1))
  ),
  "`tx` must exchange .* `opt_state/0/trace/dense/bias` that diff": (
    lambda: train_shapes(optax.chain(optax.trace(0.9), chain(INT4)))
  ),
  r"`batch` must have .* 4 workers divide, got shape \(31, 16\) at `0`": (
    lambda: train_shapes(chain(), batch=tuple(a[:-1] for a in BATCH))
  ),
  "`level` must not be given to `update`": lambda: train_shapes(
    SCHEDULED, level=1
  ),
  "`level` must be given if `codec` is a sequence": lambda: train_shapes(
    chain(INT4), level=1
  ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named(message):
  with pytest.raises((TypeError, ValueError), match=message):
    REFUSED[message]()


@pytest.mark.parametrize("own", ["", "model"])
def test_a_gradient_that_jax_has_summed_is_refused_by_name(own):
  tx = jaxmotion.exchange(("data", "model"))

  def local_update(w, x):
    w = lax.pcast(w, own, to="varying") if own else w
    grads = {"w": jax.grad(lambda w: jnp.sum(x @ w))(w)}
    return tx.update(grads, tx.init(grads))[0]

  mapped = jax.shard_map(
    local_update,
    mesh=mesh_of(2, 2),
    in_specs=(P(), P(("data", "model"))),
    out_specs=P(),
  )
  with pytest.raises(ValueError, match="`updates/w` must .* of 'data'.*summed"):
    jax.eval_shape(mapped, jnp.ones(3), jnp.ones((4, 3)))


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
def make_guarded(policy, axes="data"):
  """(init, step) of a policy; batches have weights in flat steps only."""
  if policy == "wrapped":
    tx = jaxmotion.skip_nonfinite(chain(SHARP, tail=optax.adam(1e-2)), "data")
  else:
    tx = chain(SHARP, axes, nonfinite=policy)
  weight_fn = (lambda batch: batch["weight"][0]) if axes == "data" else None
  return make(tx, axes, linear_loss, weight_fn=weight_fn)


def steps(policy, batches, weights=None, axes="data"):
  init, step = make_guarded(policy, axes)
  state = init(WEIGHTS)
  for x, weight in zip(batches, weights or [EVEN] * len(batches), strict=True):
    state, _ = step(state, {"x": x, "weight": weight})
  return state.params, state.opt_state


def test_one_workers_nonfinite_gradient_leaves_the_whole_state_as_it_was():
  bad = spoil(GOOD, (2, 3), np.inf)
  p1, s1 = steps("wrapped", [GOOD, GOOD])
  p2, s2 = steps("wrapped", [GOOD, bad, GOOD])
  assert int(s1.skipped) == 0 and int(s2.skipped) == 1
  assert bits(p1) == bits(p2)
  assert bits(s1.inner) == bits(s2.inner)


@pytest.mark.parametrize("axes", ["data", AXES], ids=str)
@pytest.mark.parametrize("policy", ["skip", "zero", "propagate"])
def test_no_policy_lets_a_nonfinite_element_into_the_error_memory(policy, axes):
  _, (before, _) = steps(policy, [GOOD], axes=axes)
  bad = spoil(GOOD, (2, 3))
  params, (after, _) = steps(policy, [GOOD, bad], axes=axes)
  last = steps(policy, [GOOD, bad, GOOD], axes=axes)[1][0]
  if policy == "zero":  # The element is left out, and nothing else.
    cleaned = spoil(GOOD, (2, 3), 0)
    assert bits(params) == bits(steps(policy, [GOOD, cleaned], axes=axes)[0])
  for error in jax.tree.leaves(last.codec_state):
    assert np.isfinite(np.asarray(error)).all()
  is_kept = bits(before.codec_state) == bits(after.codec_state)
  assert is_kept == (policy == "skip") == bool(int(after.skipped))
  assert bool(jnp.isfinite(params["w"]).all()) == (policy != "propagate")
  assert len(copies(params["w"])) == 1


def test_two_guards_agree_by_one_sum_once_compiled():
  guard = jaxmotion.skip_nonfinite(chain(SHARP, nonfinite="skip"), "data")
  init, step = make(guard, loss=linear_loss)
  args = (jax.eval_shape(init, WEIGHTS), {"x": GOOD})
  traced = wire.step_bytes(step, *args).select(dtype="int32")
  compiled = wire.compiled_bytes(step.lower(*args).compile())
  assert [(m.payload_bytes, m.count) for m in traced.moves] == [(4, 2)]
  merged = compiled.select(dtype="int32").moves
  assert [(m.payload_bytes, m.count) for m in merged] == [(4, 1)]


@pytest.mark.parametrize("policy", ["propagate", "skip", "zero", "wrapped"])
def test_a_weight_that_is_not_finite_follows_the_policy(policy):
  bad = spoil(EVEN, 1)
  before = steps(policy, [GOOD], [EVEN])
  params, after = found = steps(policy, [GOOD] * 2, [EVEN, bad])
  last = steps(policy, [GOOD] * 3, [EVEN, bad, EVEN])[1]
  for error in jax.tree.leaves(last):
    assert np.isfinite(np.asarray(error, np.float64)).all()
  if policy == "propagate":
    assert np.isnan(params["w"]).all()
  elif policy == "zero":
    zero = spoil(EVEN, 1, 0)
    assert bits(found) == bits(steps(policy, [GOOD] * 2, [EVEN, zero]))
    assert bits(params) != bits(before[0])
  else:
    assert bits(params) == bits(before[0])
    is_wrapped = policy == "wrapped"
    read = lambda s: s.inner if is_wrapped else s[0].codec_state
    assert bits(read(before[1])) == bits(read(after))
    assert int((after if is_wrapped else after[0]).skipped) == 1
