import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core
from jax.sharding import AxisType, Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, hetero, wire
from tests.compilations import compilations

WORKERS, MICROBATCH, MOST = 4, 2, 8
MESH = Mesh(np.array(jax.devices()[:WORKERS]), ("data",))
AXES = jaxmotion.HostAxes("host", "device")
HOSTS = Mesh(np.array(jax.devices()[:WORKERS]).reshape(2, 2), AXES.names)
RNG = np.random.default_rng(0)
PARAMS = {
  "a": jnp.asarray(RNG.normal(size=(6, 64)).astype(np.float32)),
  "b": jnp.asarray(RNG.normal(size=(64, 3)).astype(np.float32)),
}
EXAMPLES = 15  # The last of 8 microbatches is half full.
BATCH = {
  "x": RNG.normal(size=(EXAMPLES, 6)).astype(np.float32),
  # Targets that differ from worker to worker: no share may be guessed.
  "y": RNG.normal(size=(EXAMPLES, 3)).astype(np.float32)
  + np.arange(EXAMPLES, dtype=np.float32)[:, None],
}
SHARES = [(2, 2, 2, 2), (5, 1, 2, 0), (0, 0, 0, 8), (1, 4, 0, 3)]
EXCHANGES = {
  "plain": (MESH, "data", jaxmotion.exchange("data")),
  "skip": (MESH, "data", jaxmotion.exchange("data", nonfinite="skip")),
  "hierarchical": (
    HOSTS,
    AXES,
    jaxmotion.exchange(AXES),
  ),
}


def losses(params, x, y):
  h = jnp.tanh(x @ params["a"])
  return jnp.sum((h @ params["b"] - y) ** 2, axis=-1)


def loss_fn(params, microbatch):
  kept = microbatch["valid"]
  each = losses(params, microbatch["x"], microbatch["y"])
  return jnp.sum(jnp.where(kept, each, 0)) / jnp.sum(kept)


def count_valid(microbatch):
  return jnp.sum(microbatch["valid"])


def make_step(tx, mesh=MESH, loss=loss_fn, **options):
  options = {"weight_fn": count_valid, "microbatches": MOST} | options
  return jaxmotion.make_train_step(loss, tx, mesh, **options)


def dealt(counts, batch=None):
  x, valid = hetero.assign_microbatches(
    batch or BATCH, counts, microbatch=MICROBATCH, max_microbatches=MOST
  )
  return x | {"valid": valid}


def full_gradient(params=PARAMS):
  mean = lambda p: losses(p, BATCH["x"], BATCH["y"]).mean()
  return jax.jit(jax.value_and_grad(mean))(params)


def distance(a, b):
  def join(tree):
    leaves = jax.tree.leaves(tree)
    return np.concatenate([np.ravel(x).astype(np.float64) for x in leaves])

  assert jax.tree.structure(a) == jax.tree.structure(b)
  return np.linalg.norm(join(a) - join(b)) / np.linalg.norm(join(b))


@functools.cache
def trained_by(name):
  """The step whose optimizer's trace is the exchanged gradient."""
  mesh, axis_name, exchange = EXCHANGES[name]
  tx = optax.chain(exchange, optax.trace(0.0))
  return make_step(tx, mesh, axis_name=axis_name)


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_gradient_is_that_of_the_whole_batch_for_any_shares(name):
  init, step = trained_by(name)
  mean, exact = full_gradient()
  for counts in SHARES:
    state, loss = step(init(PARAMS), dealt(counts), counts=counts)
    assert distance(state.opt_state[1].trace, exact) < 1e-6
    assert float(loss) == pytest.approx(float(mean), rel=1e-6)


def test_compute_and_update_are_the_step():
  init, step = trained_by("plain")
  counts = (5, 1, 2, 0)
  whole, told = step(init(PARAMS), dealt(counts), counts=counts)
  state = init(PARAMS)
  work = step.compute(state, dealt(counts), counts=counts)
  # 15 examples: 10, 2, and the last microbatch is half full.
  assert work.weight.tolist() == [10, 2, 3, 0]
  state, loss = step.update(state, work)
  assert distance(state.params, whole.params) < 1e-7
  np.testing.assert_allclose(loss, told, rtol=1e-6)


def test_a_donated_state_is_refused_and_a_kept_one_trains_again():
  counts = (2, 2, 2, 2)
  init, donating = trained_by("plain")
  tx = optax.chain(jaxmotion.exchange("data"), optax.trace(0.0))
  keeping = make_step(tx, donate=False).step
  state, batch = init(PARAMS), dealt(counts)
  first, _ = keeping(state, batch, counts=counts)
  work = keeping.compute(state, batch, counts=counts)
  donating.update(state, work)
  with pytest.raises(ValueError, match="`state/params/a` must be"):
    donating(state, batch, counts=counts)
  with pytest.raises(ValueError, match="`state/params/a` must be"):
    keeping.compute(state, batch, counts=counts)
  with pytest.raises(ValueError, match="`state/params/a` must be"):
    keeping.update(state, work)
  keeping.update(first, work)


def test_one_program_serves_all_counts():
  init, step = trained_by("plain")
  state, seen = init(PARAMS), []
  for i, counts in enumerate(SHARES):
    state, _ = step(state, dealt(counts), counts=counts)
    work = step.compute(state, dealt(counts), counts=counts)
    state, _ = step.update(state, work)
    seen.append(compilations())
    assert i == 0 or seen[i] == seen[0]


def test_a_worker_computes_its_own_microbatches_and_no_others():
  batch = dealt((5, 1, 2, 0))
  # What is beyond a worker's count is never read.
  batch["x"] = np.where(batch["valid"][:, None], batch["x"], np.nan)
  init, step = make_step(
    optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1)),
    loss=lambda p, b: jnp.mean(losses(p, b["x"], b["y"])),
    weight_fn=lambda b: MICROBATCH,
  )
  counts = (5, 1, 1, 0)  # Without the one that is half full.
  state = init(PARAMS)
  work = step.compute(state, batch, counts=counts)
  assert work.weight.tolist() == [10, 2, 2, 0]
  state, _ = step.update(state, work)
  assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.params))


COLLECTIVES = {
  "psum",
  "psum2",
  "psum_invariant",
  "pmax",
  "pmin",
  "all_gather",
  "all_gather_invariant",
  "all_to_all",
  "ppermute",
  "reduce_scatter",
}


def primitives(jaxpr, in_loop=False):
  """(name, whether it is in a loop or a branch) of every equation."""
  for eqn in jaxpr.eqns:
    yield eqn.primitive.name, in_loop
    inside = in_loop or eqn.primitive.name in ("while", "scan", "cond")
    for sub in core.jaxprs_in_params(eqn.params):
      yield from primitives(getattr(sub, "jaxpr", sub), inside)


def traced(fn, *args):
  return list(primitives(jax.make_jaxpr(fn)(*args).jaxpr))


def test_no_collective_is_in_the_loop():
  init, step = trained_by("plain")
  counts = np.array((5, 1, 2, 0))
  state = init(PARAMS)
  run = lambda s, b: step(s, b, counts=counts)
  whole = traced(run, state, dealt(counts))
  assert ("while", False) in whole and ("dot_general", True) in whole
  assert any(name in COLLECTIVES for name, _ in whole)
  assert not any(name in COLLECTIVES for name, looped in whole if looped)
  compute = lambda s, b: step.compute(s, b, counts=counts)
  work = traced(compute, state, dealt(counts))
  assert ("while", False) in work
  assert not any(name in COLLECTIVES for name, _ in work)


def test_little_is_sent_besides_the_exchange():
  (init, step), counts = trained_by("plain"), np.array((5, 1, 2, 0))
  # The ledger refuses collectives in loops of unknown length.
  ledger = wire.step_bytes(
    lambda s, b: step(s, b, counts=counts), init(PARAMS), dealt(counts)
  )
  sent = sum(a.nbytes for a in PARAMS.values())
  # The loss and its weight, and the weight of the gradient.
  assert ledger.total_bytes == 2 * 3 / 4 * (sent + 2 * 4 + 4)


def test_the_walk_finds_the_collective_of_a_naive_loop():
  def naive(params, batch, n):
    batch = jax.tree.map(lambda a: a.reshape(MOST, -1, *a.shape[1:]), batch)
    grad = lambda i: jax.grad(lambda p: loss_fn(p, at(batch, i)))(params)
    at = lambda tree, i: jax.tree.map(lambda a: a[i], tree)
    add = lambda i, g: jax.tree.map(jnp.add, g, grad(i))
    return jax.lax.fori_loop(0, n[0], add, jax.tree.map(jnp.zeros_like, params))

  program = jax.shard_map(
    naive, mesh=MESH, in_specs=(P(), P("data"), P("data")), out_specs=P()
  )
  counts = np.array((2, 2, 2, 2))
  found = traced(program, PARAMS, dealt(counts), counts)
  assert any(name in COLLECTIVES for name, looped in found if looped)


def test_what_is_sent_sums_to_what_came_in_while_counts_change():
  codec = codecs.feedback(codecs.sign())
  exchange = jaxmotion.exchange("data", codec, method="gather")
  tx = optax.chain(exchange, optax.trace(0.0), optax.scale(0.0))
  init, train = make_step(tx)
  state, sent = init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)
  steps = 12
  for step in range(steps):
    counts = SHARES[step % len(SHARES)]
    state, _ = train(state, dealt(counts), counts=counts)
    sent = jax.tree.map(jnp.add, sent, state.opt_state[1].trace)
  # Parameters did not move, so every step's gradient was the same.
  came = jax.tree.map(lambda g: steps * g, full_gradient()[1])
  kept = [
    jax.vmap(codec.error)(memory.first).mean(axis=0)
    for memory in state.opt_state[0].codec_state.value
  ]
  total = jax.tree.map(jnp.add, sent, dict(zip("ab", kept, strict=True)))
  assert distance(total, came) < 1e-5
  assert distance(sent, came) > 1e-2  # There was something to remember.


def test_an_adaptive_exchange_takes_its_level_beside_the_counts():
  levels = [codecs.feedback(codecs.uniform(bits=b)) for b in (2, 8)]
  tx = optax.chain(jaxmotion.exchange("data", levels), optax.trace(0.0))
  init, step = make_step(tx)
  _, exact = full_gradient()
  errors = []
  for level in (0, 1):
    state, _ = step(
      init(PARAMS), dealt((5, 1, 2, 0)), counts=(5, 1, 2, 0), level=level
    )
    errors.append(distance(state.opt_state[1].trace, exact))
  assert errors[1] < 0.02 < errors[0]


def test_tokens_may_be_what_counts():
  lengths = np.array([1, 9, 2, 2, 7, 3])
  text = RNG.normal(size=(6, 9)).astype(np.float32)
  mask = np.arange(9) < lengths[:, None]

  def loss_fn(w, b):
    total = jnp.sum(b["mask"] * (b["text"] - w) ** 2)
    return total / jnp.sum(b["mask"])

  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.5))
  init, step = make_step(tx, loss=loss_fn, weight_fn=lambda b: b["mask"].sum())
  counts = (1, 3, 0, 2)
  batch, _ = hetero.assign_microbatches(
    {"text": text, "mask": mask}, counts, microbatch=1, max_microbatches=MOST
  )
  state = init(jnp.zeros(()))
  work = step.compute(state, batch, counts=counts)
  assert work.weight.tolist() == [1, 13, 0, 10]
  state, _ = step.update(state, work)
  # One step of Newton's method: the mean over tokens, not over sequences.
  assert float(state.params) == pytest.approx(text[mask].mean(), rel=1e-5)


def test_sums_of_narrow_gradients_are_wide():
  def loss_fn(w, b):
    return jnp.sum(w * b.astype(w.dtype)).astype(jnp.float32)

  tx = optax.chain(jaxmotion.exchange("data"), optax.trace(0.0))
  init, step = make_step(
    tx, loss=loss_fn, weight_fn=lambda b: 1, microbatches=300
  )
  # In bfloat16 256 + 1 is 256.
  counts = (300, 0, 0, 0)
  batch, _ = hetero.assign_microbatches(
    np.ones(300, np.float32), counts, microbatch=1, max_microbatches=300
  )
  params = jnp.ones((), jnp.bfloat16)
  state, _ = step(init(params), batch, counts=counts)
  assert state.params.dtype == state.opt_state[1].trace.dtype == jnp.bfloat16
  assert float(state.opt_state[1].trace) == 1.0


class Net(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(6, momentum=0.9, rngs=rngs)
    self.out = nnx.Linear(6, 3, rngs=rngs)

  def __call__(self, x, valid):
    return self.out(self.norm(x, mask=valid[:, None]))


@pytest.fixture(scope="module")
def normed():
  """(step, params, stats, path of the statistics) of a real batch norm."""
  graph, params, stats = nnx.split(Net(nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

  def loss_fn(params, stats, b):
    net = nnx.merge(graph, params, stats)
    errors = jnp.sum((net(b["x"], b["valid"]) - b["y"]) ** 2, axis=-1)
    total = jnp.sum(jnp.where(b["valid"], errors, 0))
    return total / count_valid(b), nnx.state(net, nnx.BatchStat)

  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(1e-3))
  return make_step(tx, loss=loss_fn, model_state="mean"), params, stats


@pytest.mark.parametrize("counts", SHARES)
def test_batch_statistics_are_merged_by_count(normed, counts):
  (init, step), params, stats = normed
  state, _ = step(init(params, stats), dealt(counts), counts=counts)
  parts = [BATCH["x"][i : i + 2] for i in range(0, EXAMPLES, 2)]
  sizes = np.array([len(p) for p in parts])[:, None] / EXAMPLES
  mean = (sizes * [p.mean(axis=0) for p in parts]).sum(axis=0)
  var = (sizes * [p.var(axis=0) for p in parts]).sum(axis=0)
  norm = state.model_state["norm"]
  np.testing.assert_allclose(norm["mean"][...], 0.1 * mean, atol=1e-6)
  np.testing.assert_allclose(norm["var"][...], 0.9 + 0.1 * var, atol=1e-6)


def test_batch_statistics_stay_where_nothing_counts(normed):
  (init, step), params, stats = normed
  batch = dealt((2, 2, 2, 2))
  batch["valid"][:] = False
  state, _ = step(init(params, stats), batch, counts=(2, 2, 2, 2))
  # The mean over no examples is not finite, nor is a gradient through it.
  assert distance(state.model_state, stats) == 0
  assert distance(state.params, params) == 0


def test_nothing_that_counts_changes_nothing():
  init, step = trained_by("plain")
  batch = dealt((2, 2, 2, 2))
  for valid, counts in ((False, (2, 2, 2, 2)), (True, (0, 0, 0, 0))):
    batch["valid"] = np.full_like(batch["valid"], valid)
    state, loss = step(init(PARAMS), batch, counts=counts)
    assert distance(state.params, PARAMS) == 0 and float(loss) == 0


def test_a_weight_that_is_not_a_number_reaches_every_worker():
  def weigh(microbatch):
    is_first = jnp.any(microbatch["x"] == BATCH["x"][:1])
    return jnp.where(is_first, jnp.nan, count_valid(microbatch))

  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  init, step = make_step(tx, weight_fn=weigh)
  state, loss = step(init(PARAMS), dealt((2, 2, 2, 2)), counts=[2] * 4)
  assert all(np.isnan(a).all() for a in jax.tree.leaves(state.params))
  assert np.isnan(loss)


def test_a_worker_with_a_shard_of_its_own_weighs_its_examples():
  """Equal shards, unequal draws: weights of shard size / examples drawn."""
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.5))

  init, step = make_step(
    tx,
    loss=lambda w, b: jnp.mean((b["x"] - w) ** 2),
    weight_fn=lambda b: b["weight"].sum(),
  )
  shards = np.arange(4.0, dtype=np.float32)  # All a worker has is its number.
  counts = np.array((6, 4, 4, 2))
  x = np.repeat(shards, counts)
  for weight, mean in (
    (np.ones(16), (x.sum() / 16)),
    (np.repeat(4 / counts, counts), shards.mean()),
  ):
    batch = {"x": x, "weight": weight.astype(np.float32)}
    batch, _ = hetero.assign_microbatches(
      batch, counts, microbatch=1, max_microbatches=MOST
    )
    state, _ = step(init(jnp.zeros(())), batch, counts=counts)
    assert float(state.params) == pytest.approx(mean)


def run(scheme=None, batch=None, counts=(2, 2, 2, 2), model=None, **options):
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  if model is not None:
    options |= {
      "model_state": "mean",
      "loss": lambda p, m, b: (loss_fn(p, b), m),
    }
  init, step = make_step(scheme or tx, **options)
  return step(
    init(PARAMS, *[model] * (model is not None)),
    batch or dealt((2, 2, 2, 2)),
    counts=counts,
  )


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (
      lambda: run(counts=(2, 2, 2, 9)),
      ValueError,
      r"`counts` must be 4 integers in \[0, 8\], .* got \(2, 2, 2, 9\)",
    ),
    (lambda: run(counts=(8,)), ValueError, "`counts` must be 4 integers"),
    (lambda: run(counts=(2, 2, 2, -1)), ValueError, "`counts` must be 4"),
    (lambda: run(counts=(2.0,) * 4), ValueError, "`counts` must be 4"),
    (
      lambda: run(weight_fn=None),
      ValueError,
      r"`counts` must go with a `weight_fn`, .* got \(2, 2, 2, 2\) without",
    ),
    (
      lambda: run(batch={"x": np.ones((60, 6))}),
      ValueError,
      "`microbatches` must divide the 15 examples of a worker, got 8",
    ),
    (
      lambda: run(model={"steps": jnp.zeros((), jnp.int32)}),
      TypeError,
      "`model_state/steps` must be a floating-point array, got int32",
    ),
    (
      lambda: run(jaxmotion.fully_sharded(optax.sgd(0.1))),
      ValueError,
      "`counts` must be None, because workers of a fully sharded step gather",
    ),
    (
      lambda: make_step(jaxmotion.exchange("data")).step.update(
        make_step(jaxmotion.exchange("data")).init(PARAMS), None
      ),
      TypeError,
      "`work` must be what `step.compute` returned, got None",
    ),
  ],
)
def test_bad_arguments_are_named(call, error, message):
  with pytest.raises(error, match=message):
    call()


def test_local_updates_are_weighed_by_what_each_worker_computed():
  outer = optax.chain(jaxmotion.exchange("data"), optax.sgd(1.0))
  scheme = jaxmotion.local_updates(optax.sgd(0.1), outer, every=1)
  init, step = make_step(scheme)
  counts = (5, 1, 2, 0)
  state, loss = step(init(PARAMS), dealt(counts), counts=counts)
  mean, exact = full_gradient()
  expected = jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, exact)
  assert distance(state.params, expected) < 1e-6
  np.testing.assert_allclose(loss, mean, rtol=1e-6)


def test_a_delayed_gradient_keeps_the_weights_of_its_step():
  tx = optax.chain(jaxmotion.exchange("data"), optax.trace(0.0))
  init, step = make_step(jaxmotion.delayed(tx, is_weighted=True))
  state = init(PARAMS)
  for counts in ((5, 1, 2, 0), (1, 4, 0, 3)):
    state, _ = step(state, dealt(counts), counts=counts)
  # The first step applied zeros, so the parameters are still the first ones.
  found = state.opt_state.inner[1].trace
  assert distance(found, full_gradient()[1]) < 1e-6


def test_a_loss_with_a_loop_trains_on_a_mesh_with_explicit_axes():
  def loop_loss(params, microbatch):
    each = losses(params, microbatch["x"], microbatch["y"])
    kept = jnp.where(microbatch["valid"], each, 0)
    total = jax.lax.fori_loop(0, MICROBATCH, lambda i, t: t + kept[i], 0.0)
    return total / count_valid(microbatch)

  mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Explicit,))
  tx = optax.chain(jaxmotion.exchange("data"), optax.trace(0.0), optax.sgd(0.1))
  init, step = make_step(tx, mesh, loss=loop_loss)
  counts = SHARES[1]
  state, found = step(init(PARAMS), dealt(counts), counts=counts)
  loss, gradient = full_gradient()
  np.testing.assert_allclose(found, loss, rtol=1e-5)
  assert distance(state.opt_state[1].trace, gradient) < 1e-6
