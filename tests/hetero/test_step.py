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
HOSTS = Mesh(
  np.array(jax.devices()[:WORKERS]).reshape(2, 2), ("host", "device")
)
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
    ("host", "device"),
    jaxmotion.exchange("host", local_axis="device"),
  ),
}


def losses(params, x, y):
  h = jnp.tanh(x @ params["a"])
  return jnp.sum((h @ params["b"] - y) ** 2, axis=-1)


def loss_fn(params, microbatch):
  kept = microbatch["valid"]
  each = losses(params, microbatch["x"], microbatch["y"])
  return jnp.sum(jnp.where(kept, each, 0)), jnp.sum(kept)


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
  return hetero.uneven_data_parallel(loss_fn, tx, mesh, axis_name=axis_name)


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_gradient_is_that_of_the_whole_batch_for_any_shares(name):
  uneven = trained_by(name)
  loss, exact = full_gradient()
  for counts in SHARES:
    state, metrics = uneven.step(uneven.init(PARAMS), dealt(counts), counts)
    assert distance(state.opt_state[1].trace, exact) < 1e-6
    assert float(metrics.loss) == pytest.approx(float(loss), rel=1e-6)
    assert metrics.counts.sum() == EXAMPLES


def test_work_and_update_are_the_step():
  uneven = trained_by("plain")
  counts = (5, 1, 2, 0)
  whole, told = uneven.step(uneven.init(PARAMS), dealt(counts), counts)
  state = uneven.init(PARAMS)
  work = uneven.work(state, dealt(counts), counts)
  seconds = [1.0, 2.0, 4.0, 0.0]
  state, metrics = uneven.update(state, work, np.array(seconds))
  assert distance(state.params, whole.params) < 1e-7
  np.testing.assert_allclose(metrics.loss, told.loss, rtol=1e-6)
  # 15 examples: 10, 2, and the last microbatch is half full.
  assert metrics.counts.tolist() == told.counts.tolist() == [10, 2, 3, 0]
  assert metrics.seconds.tolist() == seconds
  assert metrics.throughput.tolist() == [10, 1, 0.75, 0]
  assert told.throughput.tolist() == [0] * WORKERS


def test_a_donated_state_is_refused_and_a_kept_one_trains_again():
  counts = (2, 2, 2, 2)
  donating = trained_by("plain")
  tx = optax.chain(jaxmotion.exchange("data"), optax.trace(0.0))
  keeping = hetero.uneven_data_parallel(loss_fn, tx, MESH, donate=False)
  state, batch = donating.init(PARAMS), dealt(counts)
  first, _ = keeping.step(state, batch, counts)
  work = keeping.work(state, batch, counts)
  donating.update(state, work)
  with pytest.raises(ValueError, match="`state/params/a` must be"):
    donating.step(state, batch, counts)
  with pytest.raises(ValueError, match="`state/params/a` must be"):
    keeping.work(state, batch, counts)
  with pytest.raises(ValueError, match="`state/params/a` must be"):
    keeping.update(state, work)
  keeping.update(first, work)


def test_one_program_serves_all_counts():
  uneven = trained_by("plain")
  state, seen = uneven.init(PARAMS), []
  for i, counts in enumerate(SHARES):
    state, _ = uneven.step(state, dealt(counts), counts)
    work = uneven.work(state, dealt(counts), counts)
    state, _ = uneven.update(state, work)
    seen.append(compilations())
    assert i == 0 or seen[i] == seen[0]


def test_a_worker_computes_its_own_microbatches_and_no_others():
  batch = dealt((5, 1, 2, 0))
  # What is beyond a worker's count is never read.
  batch["x"] = np.where(batch["valid"][..., None], batch["x"], np.nan)
  uneven = hetero.uneven_data_parallel(
    lambda p, b: (jnp.sum(losses(p, b["x"], b["y"])), MICROBATCH),
    optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1)),
    MESH,
  )
  counts = (5, 1, 1, 0)  # Without the one that is half full.
  state, metrics = uneven.step(uneven.init(PARAMS), batch, counts)
  assert all(np.isfinite(a).all() for a in jax.tree.leaves(state.params))
  assert metrics.counts.tolist() == [10, 2, 2, 0]


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
  uneven = trained_by("plain")
  counts = np.array((5, 1, 2, 0))
  state = uneven.init(PARAMS)
  step = traced(lambda s, b: uneven.step(s, b, counts), state, dealt(counts))
  assert ("while", False) in step and ("dot_general", True) in step
  assert any(name in COLLECTIVES for name, _ in step)
  assert not any(name in COLLECTIVES for name, looped in step if looped)
  work = traced(lambda s, b: uneven.work(s, b, counts), state, dealt(counts))
  assert ("while", False) in work
  assert not any(name in COLLECTIVES for name, _ in work)


def test_little_is_sent_besides_the_exchange():
  uneven, counts = trained_by("plain"), np.array((5, 1, 2, 0))
  # The ledger refuses collectives in loops of unknown length.
  ledger = wire.step_bytes(
    lambda s, b: uneven.step(s, b, counts), uneven.init(PARAMS), dealt(counts)
  )
  sent = sum(a.nbytes for a in PARAMS.values())
  assert ledger.total_bytes == 2 * 3 / 4 * (sent + 4 + 3 * 4 * WORKERS)


def test_the_walk_finds_the_collective_of_a_naive_loop():
  def naive(params, batch, n):
    batch = jax.tree.map(lambda a: a[0], batch)
    grad = lambda i: jax.grad(lambda p: loss_fn(p, at(batch, i))[0])(params)
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
  uneven = hetero.uneven_data_parallel(loss_fn, tx, MESH)
  state, sent = uneven.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)
  steps = 12
  for step in range(steps):
    counts = SHARES[step % len(SHARES)]
    state, _ = uneven.step(state, dealt(counts), counts)
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
  uneven = hetero.uneven_data_parallel(loss_fn, tx, MESH)
  _, exact = full_gradient()
  errors = []
  for level in (0, 1):
    state, _ = uneven.step(
      uneven.init(PARAMS), dealt((5, 1, 2, 0)), (5, 1, 2, 0), level=level
    )
    errors.append(distance(state.opt_state[1].trace, exact))
  assert errors[1] < 0.02 < errors[0]


def test_tokens_may_be_what_counts():
  lengths = np.array([1, 9, 2, 2, 7, 3])
  text = RNG.normal(size=(6, 9)).astype(np.float32)
  mask = np.arange(9) < lengths[:, None]

  def loss_fn(w, b):
    return jnp.sum(b["mask"] * (b["text"] - w) ** 2), jnp.sum(b["mask"])

  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.5))
  uneven = hetero.uneven_data_parallel(loss_fn, tx, MESH)
  counts = (1, 3, 0, 2)
  batch, _ = hetero.assign_microbatches(
    {"text": text, "mask": mask}, counts, microbatch=1, max_microbatches=MOST
  )
  state, metrics = uneven.step(uneven.init(jnp.zeros(())), batch, counts)
  # One step of Newton's method: the mean over tokens, not over sequences.
  assert float(state.params) == pytest.approx(text[mask].mean(), rel=1e-5)
  assert metrics.counts.tolist() == [1, 13, 0, 10]


def test_sums_of_narrow_gradients_are_wide():
  def loss_fn(w, b):
    return jnp.sum(w * b.astype(w.dtype)).astype(jnp.float32), b.size

  tx = optax.chain(jaxmotion.exchange("data"), optax.trace(0.0))
  uneven = hetero.uneven_data_parallel(loss_fn, tx, MESH)
  # In bfloat16 256 + 1 is 256.
  counts = (300, 0, 0, 0)
  batch, _ = hetero.assign_microbatches(
    np.ones(300, np.float32), counts, microbatch=1, max_microbatches=300
  )
  params = jnp.ones((), jnp.bfloat16)
  state, _ = uneven.step(uneven.init(params), batch, counts)
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
    return total, jnp.sum(b["valid"]), nnx.state(net, nnx.BatchStat)

  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(1e-3))
  uneven = hetero.uneven_data_parallel(loss_fn, tx, MESH, stateful=True)
  return uneven, params, stats


@pytest.mark.parametrize("counts", SHARES)
def test_batch_statistics_are_merged_by_count(normed, counts):
  uneven, params, stats = normed
  state = uneven.init(params, stats)
  state, _ = uneven.step(state, dealt(counts), counts)
  parts = [BATCH["x"][i : i + 2] for i in range(0, EXAMPLES, 2)]
  sizes = np.array([len(p) for p in parts])[:, None] / EXAMPLES
  mean = (sizes * [p.mean(axis=0) for p in parts]).sum(axis=0)
  var = (sizes * [p.var(axis=0) for p in parts]).sum(axis=0)
  norm = state.stats["norm"]
  np.testing.assert_allclose(norm["mean"][...], 0.1 * mean, atol=1e-6)
  np.testing.assert_allclose(norm["var"][...], 0.9 + 0.1 * var, atol=1e-6)


def test_batch_statistics_stay_where_nothing_counts(normed):
  uneven, params, stats = normed
  state = uneven.init(params, stats)
  batch = dealt((2, 2, 2, 2))
  batch["valid"][:] = False
  state, _ = uneven.step(state, batch, (2, 2, 2, 2))
  # The mean over no examples is not finite, nor is a gradient through it.
  assert distance(state.stats, stats) == distance(state.params, params) == 0


def test_nothing_that_counts_changes_nothing():
  uneven = trained_by("plain")
  batch = dealt((2, 2, 2, 2))
  for valid, counts in ((False, (2, 2, 2, 2)), (True, (0, 0, 0, 0))):
    batch["valid"] = np.full_like(batch["valid"], valid)
    state, metrics = uneven.step(uneven.init(PARAMS), batch, counts)
    assert distance(state.params, PARAMS) == 0
    assert float(metrics.loss) == 0 and metrics.counts.tolist() == [0] * 4


def test_a_count_that_is_not_a_number_reaches_every_worker():
  def count_nothing(params, microbatch):
    total, count = loss_fn(params, microbatch)
    return total, jnp.where(
      jnp.any(microbatch["x"] == BATCH["x"][:1]), jnp.nan, count
    )

  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  uneven = hetero.uneven_data_parallel(count_nothing, tx, MESH)
  state, metrics = uneven.step(
    uneven.init(PARAMS), dealt((2, 2, 2, 2)), [2] * 4
  )
  assert all(np.isnan(a).all() for a in jax.tree.leaves(state.params))
  assert np.isnan(metrics.loss) and np.isnan(metrics.counts[0])


def test_a_worker_with_a_shard_of_its_own_weighs_its_examples():
  """Equal shards, unequal draws: weights of shard size / examples drawn."""
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.5))

  def loss_fn(w, b):
    return jnp.sum(b["weight"] * (b["x"] - w) ** 2), jnp.sum(b["weight"])

  uneven = hetero.uneven_data_parallel(loss_fn, tx, MESH)
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
    state, _ = uneven.step(uneven.init(jnp.zeros(())), batch, counts)
    assert float(state.params) == pytest.approx(mean)


def make(loss_fn=loss_fn, mesh=MESH, **options):
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  return hetero.uneven_data_parallel(loss_fn, tx, mesh, **options)


def run(loss_fn=loss_fn, batch=None, counts=(2, 2, 2, 2), stats=None):
  uneven = make(loss_fn, stateful=stats is not None)
  state = uneven.init(PARAMS, stats)
  return uneven.step(state, batch or dealt((2, 2, 2, 2)), counts)


@pytest.mark.parametrize(
  ("call", "error", "message"),
  [
    (
      lambda: run(counts=(2, 2, 2, 9)),
      ValueError,
      r"`counts` must be 4 integers in \[0, 8\], got \(2, 2, 2, 9\)",
    ),
    (lambda: run(counts=(8,)), ValueError, "`counts` must be 4 integers"),
    (lambda: run(counts=(2, 2, 2, -1)), ValueError, "`counts` must be 4"),
    (
      lambda: run(batch={"x": np.ones((2, 8, 2, 6))}),
      ValueError,
      r"`batch` must have leaves .*\(4 workers, max_.*got \[\(2, 8\)\]",
    ),
    (
      lambda: run(batch={"x": np.ones((4, 8, 2)), "y": np.ones((4, 7, 2))}),
      ValueError,
      "`batch` must have leaves",
    ),
    (
      lambda: run(lambda p, b: jnp.sum(p["a"])),
      ValueError,
      r"`loss_fn` must return \(total, count\), got 1 values",
    ),
    (
      lambda: run(lambda p, b: (p["a"], 1)),
      ValueError,
      r"`loss_fn` must return scalars, got float32\[6,64\] as total",
    ),
    (
      lambda: run(lambda p, b: (jnp.sum(p["a"]), b["valid"])),
      ValueError,
      "must return scalars, got bool.2. as count",
    ),
    (
      lambda: run(lambda p, b: (jnp.int32(1), 1)),
      TypeError,
      "`total` must be a floating-point array",
    ),
    (
      lambda: run(
        lambda p, s, b: (jnp.sum(p["a"]), 1, {"mean": s["mean"][:1]}),
        stats={"mean": jnp.zeros(3)},
      ),
      ValueError,
      "`loss_fn` must return stats of the structure, .*got .*float32.1.",
    ),
    (
      lambda: run(stats={"steps": jnp.zeros((), jnp.int32)}),
      TypeError,
      "`stats/steps` must be a floating-point array, got int32",
    ),
    (
      lambda: make(stateful=True).init(PARAMS),
      ValueError,
      "`stats` must be given if `stateful` and only then, got none for True",
    ),
    (
      lambda: make().init(PARAMS, {"mean": jnp.zeros(3)}),
      ValueError,
      "`stats` must be given .* got some for False",
    ),
    (
      lambda: make(axis_name="rows"),
      ValueError,
      "`axis_name` must be an axis of the mesh .*got 'rows'",
    ),
    (
      lambda: make().update(None, None, np.ones(3)),
      ValueError,
      r"`seconds` must be float32\[4\], got",
    ),
  ],
)
def test_bad_arguments_are_named(call, error, message):
  with pytest.raises(error, match=message):
    call()


def test_a_loss_with_a_loop_trains_on_a_mesh_with_explicit_axes():
  def loop_loss(params, microbatch):
    each = losses(params, microbatch["x"], microbatch["y"])
    kept = jnp.where(microbatch["valid"], each, 0)
    total = jax.lax.fori_loop(0, MICROBATCH, lambda i, t: t + kept[i], 0.0)
    return total, jnp.sum(microbatch["valid"])

  mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Explicit,))
  tx = optax.chain(jaxmotion.exchange("data"), optax.trace(0.0), optax.sgd(0.1))
  uneven = hetero.uneven_data_parallel(loop_loss, tx, mesh)
  counts = SHARES[1]
  state, metrics = uneven.step(uneven.init(PARAMS), dealt(counts), counts)
  loss, gradient = full_gradient()
  np.testing.assert_allclose(metrics.loss, loss, rtol=1e-5)
  assert distance(state.opt_state[1].trace, gradient) < 1e-6
