"""Steps on modules of Flax NNX, run by every worker."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmotion
import jaxmotion.nnx
from jaxmotion import codecs

MESH = jax.sharding.Mesh(jax.devices()[:4], ("data",))
BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
  "y": np.array([0, 1, 0, 1, 1, 0, 1, 0], np.int32),
}
INT8 = codecs.feedback(codecs.uniform(bits=8, block=4))


class Network(nnx.Module):
  """A network with statistics, noise and a variable of another type."""

  def __init__(self, rngs):
    self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.last = nnx.Linear(3, 2, rngs=rngs)
    self.seen = nnx.Cache(jnp.zeros(3))

  def __call__(self, x):
    self.seen[...] = x.mean(0)
    return self.last(self.drop(self.norm(x)))


def make_loop(tx, **options):
  model = Network(nnx.Rngs(0))
  tx = jaxmotion.bind_mesh(tx, MESH)
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  metrics = nnx.MultiMetric(
    accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
  )

  @jaxmotion.nnx.parallelize_step(MESH, **options)
  def train_step(model, optimizer, metrics, batch):
    def loss_fn(model):
      logits = model(batch["x"])
      cross_entropy = optax.softmax_cross_entropy_with_integer_labels
      losses = cross_entropy(logits, batch["y"])
      return losses.mean(), logits

    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    metrics.update(loss=loss, logits=logits, labels=batch["y"])
    optimizer.update(model, grads)
    return loss, jax.lax.all_gather(logits == 0, "data", tiled=True)

  return train_step, model, optimizer, metrics


def test_state_of_each_type_follows_all_workers():
  tx = optax.chain(jaxmotion.exchange("data", INT8), optax.sgd(0.1))
  step, *nodes = make_loop(tx, mean=[nnx.Cache])
  model, optimizer, metrics = nodes
  old = jax.tree.map(np.array, nnx.state(model, nnx.Param))
  dropped = []
  for _ in range(2):
    loss, _ = step(*nodes, BATCH)
    dropped.append(loss)
  assert dropped[0] != dropped[1]
  # Statistics: each worker sees two examples; their mean is kept.
  mean = BATCH["x"].mean(0)
  np.testing.assert_allclose(model.norm.mean[...], 0.75 * mean, rtol=1e-5)
  np.testing.assert_allclose(model.seen[...], mean, rtol=1e-5)
  # Metrics: the examples of all workers.
  assert metrics.accuracy.count[...] == 16 and metrics.loss.count[...] == 8
  mean_loss = metrics.compute()["loss"]
  np.testing.assert_allclose(mean_loss, np.mean(dropped), rtol=1e-5)
  assert optimizer.step[...] == 2
  # Keys are as they were, so that a checkpoint holds no worker's own.
  np.testing.assert_array_equal(
    jax.random.key_data(model.drop.rngs.key[...]),
    jax.random.key_data(Network(nnx.Rngs(0)).drop.rngs.key[...]),
  )
  assert model.drop.rngs.count[...] == 2
  new = nnx.state(model, nnx.Param)
  moved = jax.tree.map(lambda a, b: np.any(a != b), old, new)
  assert all(jax.tree.leaves(moved))
  memory = nnx.state(optimizer.opt_state[0].codec_state)
  for leaf in jax.tree.leaves(memory):
    assert leaf.shape[0] == 4 and leaf.sharding.spec[0] == "data"


def test_workers_hold_their_parts_of_a_sharded_optimizer():
  """On a mesh with explicit axes, under `jax.set_mesh`."""
  mesh = jax.make_mesh((4,), ("data",))
  x = np.random.default_rng(1).normal(size=(8, 24)).astype(np.float32)

  def loss_fn(model, x):
    return jnp.mean(model(x) ** 2)

  def make(tx):
    model = nnx.Linear(24, 12, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

  @jaxmotion.nnx.parallelize_step(mesh)
  def step(model, optimizer, batch):
    grads = nnx.grad(loss_fn)(model, batch)
    optimizer.update(model, grads)

  @nnx.jit
  def plain_step(model, optimizer):
    optimizer.update(model, nnx.grad(loss_fn)(model, x))

  adam = optax.adam(0.1)
  alone, plain = make(adam)
  tx = jaxmotion.sharded("data", adam, weight_codec=codecs.identity())
  with jax.set_mesh(mesh):
    model, optimizer = make(jaxmotion.bind_mesh(tx, mesh))
    for _ in range(2):
      step(model, optimizer, x)
  for _ in range(2):
    plain_step(alone, plain)
  np.testing.assert_allclose(model.kernel[...], alone.kernel[...], atol=1e-5)
  moments = optimizer.opt_state.inner.value[0].mu["kernel"]
  assert {s.data.shape for s in moments[...].addressable_shards} == {(6, 12)}


def test_each_worker_drops_elements_of_its_own():
  @jaxmotion.nnx.parallelize_step(MESH)
  def step(drop, batch):
    return jax.lax.all_gather(drop(jnp.ones(32)), "data")

  rows = np.asarray(step(nnx.Dropout(0.5, rngs=nnx.Rngs(0)), np.zeros(4)))
  assert len({row.tobytes() for row in rows}) == 4


def test_a_donated_array_belongs_to_one_variable():
  @jaxmotion.nnx.parallelize_step(MESH, donate_argnames="model")
  def step(model, other, batch):
    return batch.mean()

  # Placed on the mesh before: the step would copy other arrays.
  array = jax.device_put(jnp.ones(2), jax.sharding.NamedSharding(MESH, jax.P()))
  with pytest.raises(ValueError, match="must be an array of its own"):
    step(nnx.Dict(w=nnx.Param(array)), nnx.Dict(w=nnx.Param(array)), np.ones(4))


def test_what_differs_is_refused_by_its_path():
  tx = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))
  step, *nodes = make_loop(tx)
  with pytest.raises(ValueError, match="differs at 'model/seen'"):
    step.lower(*nodes, BATCH)
  step, *nodes = make_loop(optax.sgd(0.1), mean=[nnx.Cache])
  with pytest.raises(ValueError, match="differs at 'model/last/bias'"):
    step.lower(*nodes, BATCH)

  @jaxmotion.nnx.parallelize_step(MESH)
  def measure(metric, batch):
    metric.update(values=batch)

  with pytest.raises(TypeError, match="`metric` must be an nnx.metrics.Aver"):
    measure(nnx.metrics.Welford(), np.zeros(4, np.float32))

  @jaxmotion.nnx.parallelize_step(MESH)
  def grow(model, batch):
    model.extra = nnx.Param(jnp.zeros(2))

  with pytest.raises(ValueError, match="`fun` must keep the variables"):
    grow(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), np.zeros(4))


def test_a_batch_on_other_devices_is_refused_by_name():
  @jaxmotion.nnx.parallelize_step(MESH)
  def step(model, batch):
    return model.w[...] * jax.lax.pmean(batch.mean(), "data")

  model = nnx.Dict(w=nnx.Param(jnp.ones(2)))
  with pytest.raises(ValueError, match="`batch` must be on the 4 devices of"):
    step(model, jax.device_put(np.ones(4), jax.devices()[-1]))
  with pytest.raises(TypeError, match="`batch` must be .*`static_argnames`"):
    step.lower(model, "text")
  _, result = step.eval_shape(model, np.ones(4))
  assert result.shape == (2,)


def test_arguments_are_those_of_jit():
  traced = []

  @jaxmotion.nnx.parallelize_step(
    MESH, static_argnames="train", donate_argnums=0
  )
  def step(model, batch, *, rate, train=True, scale=2):
    traced.append((train, scale))
    if not train or scale != 2:  # Neither of them is traced.
      return batch.mean()
    model.kernel[...] += rate
    return batch.mean()

  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  first = model.kernel[...] + 0
  step(model, np.ones(4), rate=0.5)
  kept = model.bias[...]
  step(model, np.ones(4), rate=1.0, train=True)
  step(model, np.ones(4), rate=1.0, train=False)
  np.testing.assert_allclose(model.kernel[...], first + 1.5, rtol=1e-6)
  assert kept.is_deleted() and not model.bias[...].is_deleted()
  # Once for each value of `train`, and once for the default left out.
  assert traced == [(True, 2), (True, 2), (False, 2)]


def test_attributes_may_be_dicts_and_lists():
  traced = []

  @jaxmotion.nnx.parallelize_step(MESH)
  def step(model, batch):
    traced.append(model.config["rate"])
    model.kernel[...] += model.config["rate"]
    return batch.mean()

  model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
  model.config, model.sizes = {"rate": 0.5}, [1, 2]
  first = model.kernel[...] + 0
  for rate in (0.5, 0.5, 2.0):  # Flax does not trace them.
    model.config = {"rate": rate}
    step(model, np.ones(4))
  np.testing.assert_allclose(model.kernel[...], first + 3, rtol=1e-6)
  assert traced == [0.5, 2.0] and model.sizes == [1, 2]


def test_metrics_start_again_on_explicit_axes():
  mesh = jax.make_mesh((4,), ("data",))
  metric = nnx.metrics.Average()

  @jaxmotion.nnx.parallelize_step(mesh)
  def step(metric, batch):
    metric.update(values=batch)

  with jax.set_mesh(mesh):
    for _ in range(2):
      metric.reset()
      step(metric, jnp.arange(8.0))
  assert metric.compute() == 3.5 and metric.count[...] == 8


def test_an_optimizer_keeps_state_that_workers_share_once():
  factors = codecs.feedback(codecs.low_rank(rank=1))
  codec = codecs.where_smaller(factors)
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1))
  tx = jaxmotion.bind_mesh(tx, MESH)
  model = nnx.Linear(6, 4, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  @jaxmotion.nnx.parallelize_step(MESH)
  def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
    optimizer.update(model, grads)
    return loss

  x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
  losses = [float(train_step(model, optimizer, x)) for _ in range(3)]
  assert losses[2] < losses[0]
  state = jax.tree.leaves(nnx.state(optimizer.opt_state))
  factors = [a for a in state if a.shape == (1, 4, 1)]
  assert len(factors) == 1 and factors[0].sharding.is_fully_replicated
