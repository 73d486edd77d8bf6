"""Weights of workers and microbatches, and unequal numbers of these."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, hetero, wire
from tests.compilations import compilations
from tests.meshes import mesh_of

WORKERS, MICROBATCH, MOST = 4, 2, 8
MESH = mesh_of(WORKERS)
AXES = jaxmotion.HostAxes("host", "device")
HOSTS = mesh_of(2, 2, names=AXES.names)
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
  "plain": {},
  "hierarchical": dict(
    exchange=jaxmotion.exchange(AXES), mesh=HOSTS, axis_name=AXES
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


@functools.cache
def full_gradient():
  mean = lambda p: losses(p, BATCH["x"], BATCH["y"]).mean()
  return jax.jit(jax.value_and_grad(mean))(PARAMS)


def distance(a, b):
  def join(tree):
    leaves = jax.tree.leaves(tree)
    return np.concatenate([np.ravel(x).astype(np.float64) for x in leaves])

  assert jax.tree.structure(a) == jax.tree.structure(b)
  return np.linalg.norm(join(a) - join(b)) / np.linalg.norm(join(b))


def mean_step(scale=1.0, exchange=None, **options):
  """A step whose optimizer's trace is the exchanged gradient."""
  tx = optax.chain(exchange or jaxmotion.exchange("data"), optax.trace(0.0))
  tx = optax.chain(tx, optax.scale(scale))
  return make_step(tx, donate=False, **options)


@functools.cache
def shared_step(name="plain"):
  return mean_step(**EXCHANGES[name])


def read_mean(state):
  return state.opt_state[0][1].trace


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_gradient_is_that_of_the_whole_batch_for_any_shares(name):
  init, step = shared_step(name)
  mean, exact = full_gradient()
  start, seen = init(PARAMS), []
  for counts in SHARES:
    batch = dealt(counts)
    results = [step(start, batch, counts=counts)]
    if name == "plain":  # In two programs, too.
      work = step.compute(start, batch, counts=counts)
      results.append(step.update(start, work))
      # The last microbatch is half full.
      weights = {(5, 1, 2, 0): [10, 2, 3, 0], (0, 0, 0, 8): [0, 0, 0, 15]}
      assert counts not in weights or work.weight.tolist() == weights[counts]
    for state, loss in results:
      assert distance(read_mean(state), exact) < 1e-6
      np.testing.assert_allclose(loss, mean, rtol=1e-6)
    seen.append(compilations())
  assert set(seen) == {seen[0]}  # One program serves all counts.


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


def test_little_is_sent_besides_the_exchange_and_nothing_in_the_loop():
  (init, step), counts = shared_step(), np.array((5, 1, 2, 0))
  args = init(PARAMS), dealt(counts)
  # The ledger refuses collectives in loops of unknown length.
  ledger = wire.step_bytes(lambda s, b: step(s, b, counts=counts), *args)
  sent = sum(a.nbytes for a in PARAMS.values())
  # The loss and its weight, and the weight of the gradient.
  assert ledger.total_bytes == 2 * 3 / 4 * (sent + 2 * 4 + 4)
  compute = lambda s, b: step.compute(s, b, counts=counts)
  assert wire.step_bytes(compute, *args).total_bytes == 0


def test_what_is_sent_sums_to_what_came_in_while_counts_change():
  codec = codecs.feedback(codecs.sign())
  exchange = jaxmotion.exchange("data", codec, method="gather")
  init, train = mean_step(0.0, exchange)
  state, sent = init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS)
  steps = 2 * len(SHARES)
  for step in range(steps):
    counts = SHARES[step % len(SHARES)]
    state, _ = train(state, dealt(counts), counts=counts)
    sent = jax.tree.map(jnp.add, sent, read_mean(state))
  # Parameters did not move, so every step's gradient was the same.
  came = jax.tree.map(lambda g: steps * g, full_gradient()[1])
  error = jax.jit(jax.vmap(codec.error))
  kept = [
    error(memory.first).mean(axis=0)
    for memory in state.opt_state[0][0].codec_state.value
  ]
  total = jax.tree.map(jnp.add, sent, dict(zip("ab", kept, strict=True)))
  assert distance(total, came) < 1e-5
  assert distance(sent, came) > 1e-2  # There was something to remember.


@pytest.mark.parametrize("counts", [(300, 0, 0, 0), None])
def test_sums_of_narrow_gradients_are_wide(counts):
  def loss_fn(w, b):
    return jnp.sum(w * b.astype(w.dtype)).astype(jnp.float32)

  init, step = mean_step(loss=loss_fn, weight_fn=lambda b: 1, microbatches=300)
  # In bfloat16 256 + 1 is 256.
  batch = np.ones(300 * WORKERS, np.float32)
  params = jnp.ones((), jnp.bfloat16)
  state, _ = step(init(params), batch, counts=counts)
  assert state.params.dtype == read_mean(state).dtype == jnp.bfloat16
  assert float(read_mean(state)) == 1.0


def test_padded_batches_give_the_mean_of_the_whole_batch():
  def loss_and_aux(params, batch):
    loss = loss_fn(params, batch)
    return loss, {"twice": 2 * loss, "valid": count_valid(batch)}

  init, step = mean_step(loss=loss_and_aux, has_aux=True)
  batch = dealt((5, 1, 2, 0))
  state, (loss, aux) = step(init(PARAMS), batch)
  mean, gradient = full_gradient()
  assert distance(read_mean(state), gradient) < 1e-6
  np.testing.assert_allclose((loss, aux["twice"] / 2), mean, rtol=1e-6)
  valid = batch["valid"].reshape(WORKERS, MOST, -1).sum(-1)
  np.testing.assert_array_equal(aux["valid"], valid)


def test_model_state_and_keys_go_through_the_microbatches():
  def loss(params, model_state, batch, key):
    draw = jax.random.uniform(key)
    mean = 0.5 * model_state["mean"] + 0.5 * jnp.mean(batch)
    state = {"mean": mean, "seen": model_state["seen"] + 1}
    return params * jnp.mean(batch), (state, {"draw": draw[None]})

  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(1.0))
  init, step = jaxmotion.make_train_step(
    loss, tx, MESH, has_aux=True, model_state="mean", microbatches=2
  )
  x, key = RNG.normal(size=16).astype(np.float32), jax.random.key(5)
  model = {"mean": jnp.ones(()), "seen": jnp.zeros((), int)}
  state, (value, aux) = step(init(jnp.ones(()), model), x, key=key)
  means = x.reshape(WORKERS, 2, 2).mean(2)
  np.testing.assert_allclose(value, x.mean(), rtol=1e-5)
  expected = (0.25 + 0.25 * means[:, 0] + 0.5 * means[:, 1]).mean()
  np.testing.assert_allclose(state.model_state["mean"], expected, rtol=1e-5)
  assert int(state.model_state["seen"]) == 2
  of_worker = jax.random.fold_in(jax.random.fold_in(key, 0), 3)
  draw = jax.random.uniform(jax.random.fold_in(of_worker, 1))
  draws = np.asarray(aux["draw"])
  np.testing.assert_array_equal(draws[3, 1], [draw])
  assert len(np.unique(draws)) == 2 * WORKERS


@pytest.mark.parametrize(
  ("weight", "found"),
  [
    (lambda batch: batch["valid"], "bool"),
    (lambda batch: jnp.any(batch["valid"]), "bool"),
    (lambda batch: batch["valid"].astype(int), "int"),
    (lambda batch: None, "None"),
  ],
)
def test_a_weight_that_is_no_number_is_refused(weight, found):
  init, step = make_step(jaxmotion.exchange("data"), weight_fn=weight)
  message = f"`weight_fn` must return a real scalar, got {found}"
  with pytest.raises(TypeError, match=message):
    step.eval_shape(jax.eval_shape(init, PARAMS), dealt((2, 2, 2, 2)))


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


def test_batch_statistics_are_merged_by_count(normed):
  (init, step), params, stats = normed
  parts = [BATCH["x"][i : i + 2] for i in range(0, EXAMPLES, 2)]
  sizes = np.array([len(p) for p in parts])[:, None] / EXAMPLES
  mean = (sizes * [p.mean(axis=0) for p in parts]).sum(axis=0)
  var = (sizes * [p.var(axis=0) for p in parts]).sum(axis=0)
  for counts in SHARES:
    state, _ = step(init(params, stats), dealt(counts), counts=counts)
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
  init, step = shared_step()
  batch = dealt((2, 2, 2, 2))
  for valid, counts in (
    (False, (2, 2, 2, 2)),
    (False, None),
    (True, (0, 0, 0, 0)),
  ):
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


def run(batch=None, counts=(2, 2, 2, 2), model=None, **options):
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  if model is not None:
    options |= {
      "model_state": "mean",
      "loss": lambda p, m, b: (loss_fn(p, b), m),
    }
  init, step = make_step(tx, **options)
  return step(
    init(PARAMS, *[model] * (model is not None)),
    batch or dealt((2, 2, 2, 2)),
    counts=counts,
  )


REFUSED = {
  r"must be 4 integers in \[0, 8\], .* 2, 9\)": dict(counts=(2, 2, 2, 9)),
  r"`counts` must be 4 integers.* got \(8,\)": dict(counts=(8,)),
  r"must go with a `weight_fn`, .* 2\) without": dict(weight_fn=None),
  "`microbatches` must divide the 15 examples of a worker, got 8": dict(
    batch={"x": np.ones((60, 6))}
  ),
  "`model_state/steps` must be a floating-point array, got int32": dict(
    model={"steps": jnp.zeros((), jnp.int32)}
  ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_arguments_are_named(message):
  with pytest.raises((TypeError, ValueError), match=message):
    run(**REFUSED[message])


def test_a_delayed_gradient_keeps_the_weights_of_its_step():
  tx = optax.chain(jaxmotion.exchange("data"), optax.trace(0.0))
  init, step = make_step(jaxmotion.delayed(tx, is_weighted=True))
  state = init(PARAMS)
  for counts in ((5, 1, 2, 0), (1, 4, 0, 3)):
    state, _ = step(state, dealt(counts), counts=counts)
  # The first step applied zeros, so the parameters are still the first ones.
  found = state.opt_state.inner[1].trace
  assert distance(found, full_gradient()[1]) < 1e-6


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shards_of_a_model_are_updated_by_the_whole_gradient(kind):
  specs = {"a": P(None, "model"), "b": P("model")}

  def sharded_loss(params, microbatch):
    hidden = jnp.tanh(microbatch["x"] @ params["a"])
    # Explicit axes want to be told where a product is whose sum they share.
    out = P(None, None) if kind == AxisType.Explicit else None
    y = jnp.dot(hidden, params["b"], out_sharding=out)
    kept = microbatch["valid"]
    each = jnp.sum((y - microbatch["y"]) ** 2, -1)
    return jnp.sum(jnp.where(kept, each, 0)) / jnp.sum(kept)

  mesh = mesh_of(2, 2, kind=kind)
  codec = codecs.feedback(codecs.uniform(bits=8, block=8))
  init, step = mean_step(
    exchange=jaxmotion.exchange("data", codec),
    mesh=mesh,
    loss=sharded_loss,
    specs=specs,
  )
  counts = (5, 3)
  state = init(PARAMS)
  if kind == AxisType.Explicit:
    state, loss = step(state, dealt(counts), counts=counts)
  else:  # In two programs, between which gradients stay sharded.
    work = step.compute(state, dealt(counts), counts=counts)
    a = work.grads["a"].sharding
    assert a.is_equivalent_to(NamedSharding(mesh, P("data", None, "model")), 3)
    assert work.weight.tolist() == [10, 5]
    state, loss = step.update(state, work)
  mean, gradient = full_gradient()
  np.testing.assert_allclose(loss, mean, rtol=1e-5)
  assert distance(read_mean(state), gradient) < 0.02
  for name, spec in specs.items():
    for leaf in (state.params[name], read_mean(state)[name]):
      assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
  # Each of four devices remembers the error of its shard.
  memory = jax.tree.leaves(state.opt_state[0][0].codec_state)
  assert {leaf.shape[0] for leaf in memory} == {4}
