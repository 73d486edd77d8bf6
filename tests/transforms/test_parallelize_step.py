"""Training steps of other people, run by every worker."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jaxmotion
from jaxmotion import codecs, transforms, wire
from tests.compilations import compilations
from tests.transforms.helpers import assert_same

MESH = jax.sharding.Mesh(jax.devices()[:4], ("data",))
PARAMS = {"w": np.full((3, 2), 0.5, np.float32)}
BATCH = {
  "x": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
  "y": np.random.default_rng(1).normal(size=(8, 2)).astype(np.float32),
}
INT8 = codecs.feedback(codecs.uniform(bits=8, block=4))


def make_step(tx, **options):
  @jaxmotion.parallelize_step(MESH, **options)
  def train_step(params, opt_state, batch):
    def loss_fn(params):
      return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return train_step


def trace(fun, *args, **options):
  """Traces a step that is run by every worker."""
  return jaxmotion.parallelize_step(MESH, **options)(fun).eval_shape(*args)


@pytest.mark.parametrize("nested", [False, True])
def test_a_step_is_that_of_a_made_step(nested):
  tx = optax.chain(jaxmotion.exchange("data", INT8), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(
    lambda p, b: jnp.mean((b["x"] @ p["w"] - b["y"]) ** 2), tx, MESH
  )
  made, loss = step(init(PARAMS), BATCH)
  expected = made.params, made.opt_state, loss
  bound = jaxmotion.bind_mesh(tx, MESH)
  train_step = make_step(bound)
  state = bound.init(PARAMS)
  results = (jax.jit(train_step) if nested else train_step)(
    PARAMS, state, batch=BATCH
  )
  assert_same(results, expected)


def test_a_loop_compiles_once_and_sends_the_payloads_alone():
  tx = jaxmotion.bind_mesh(
    optax.chain(jaxmotion.exchange("data", INT8), optax.sgd(0.1)), MESH
  )
  step = make_step(tx, donate_argnames=("params", "opt_state"))
  params = jax.tree.map(jnp.asarray, PARAMS)
  state = tx.init(params)
  sent = wire.compiled_bytes(step.lower(params, state, BATCH).compile())
  # The words of three workers, and the mean of the loss.
  assert sent.total_bytes == 3 * 24 + 6
  first = step(params, state, BATCH)
  before = compilations()
  step(*first[:2], BATCH)
  assert compilations() == before
  with pytest.raises(
    ValueError, match="`params/w` must be an array that still"
  ):
    step(*first[:2], BATCH)


def test_arguments_are_those_of_jit():
  class Trainer:
    """A trainer whose step is a method, and branches on its arguments."""

    rate = 0.5

    @functools.partial(
      jaxmotion.parallelize_step,
      MESH,
      static_argnames=["mode"],
      static_argnums=0,
      donate_argnums=(1,),
    )()
    def step(self, w, batch, *extra, mode="fit", shift=0, **named):
      if mode == "fit" and not shift:  # A default is not traced.
        w = w + self.rate
      return w * named.get("scale", 1), sum(extra, batch.mean())

  trainer, w = Trainer(), np.ones(2, np.float32)
  placed = jax.device_put(w, jax.sharding.NamedSharding(MESH, jax.P()))
  new, mean = trainer.step(placed, np.ones(4), 1.0, 2.0, scale=2)
  assert new.tolist() == [3, 3] and mean == 4 and placed.is_deleted()
  assert trainer.step(w, np.ones(4), mode="hold")[0].tolist() == [1, 1]
  assert (
    trainer.step(w=w, mode="fit", batch=np.ones(4))[0].tolist() == [1.5] * 2
  )
  # One and True are equal, but are no equal static arguments.
  kinds = []
  record = jaxmotion.parallelize_step(MESH, static_argnums=-1)(
    functools.partial(lambda kinds, batch, x: kinds.append(x), kinds)
  )
  for x in (1, True, 1):
    record(np.ones(4), x)
  assert kinds == [1, True] and kinds[1] is True


def test_wrong_static_arguments_are_named():
  def step(state, batch, mode="fit"):
    return batch.mean()

  batch = np.ones(4)
  with pytest.raises(TypeError, match="`mode` must be a.*`static_argnames`"):
    jaxmotion.parallelize_step(MESH)(step)(1.0, batch, "fit")
  for message, options in {
    "`static_argnames` must name param": {"static_argnames": "mod"},
    "`donate_argnums` must be positions": {"donate_argnums": 3},
    "`donate_argnames` must name no static parameters": {
      "static_argnums": 0,
      "donate_argnums": 0,
    },
    "`batch` must name no static parameters": {"static_argnums": 1},
  }.items():
    with pytest.raises(ValueError, match=message):
      trace(step, 1.0, batch, **options)
  with pytest.raises(TypeError, match="`state` must be hashable, because"):
    trace(step, [1.0], batch, static_argnums=0)


def test_state_of_every_kind_stays_with_its_worker():
  tx = optax.chain(
    jaxmotion.per_worker(optax.trace(0.9), "data"),
    jaxmotion.sharded("data", optax.adam(0.1)),
  )
  tx = jaxmotion.bind_mesh(tx, MESH)
  state = tx.init(PARAMS)
  _, new, _ = make_step(tx).eval_shape(PARAMS, state, BATCH)
  like = jax.tree.map(lambda a: (a.shape, a.dtype), (state, new))
  assert like[0] == like[1]


def test_what_differs_is_refused_by_its_path():
  with pytest.raises(ValueError, match="'train_step: 0/w'.*jaxmotion.exchange"):
    make_step(optax.sgd(0.1)).eval_shape(
      PARAMS, optax.sgd(0.1).init(PARAMS), BATCH
    )
  with pytest.raises(ValueError, match="differs at '<lambda>: '"):
    trace(lambda batch: jnp.sum(batch > 0), BATCH["x"])
  total = trace(lambda batch: lax.psum(jnp.sum(batch > 0), "data"), BATCH["x"])
  assert total.shape == ()
  with pytest.raises(ValueError, match="`batch` must name parameters of the"):
    trace(lambda params, x: x, PARAMS, BATCH)
  with pytest.raises(ValueError, match="`mean` must match a result each"):
    trace(lambda batch: 0.0, BATCH, mean=["stats"])
  with pytest.raises(ValueError, match="`batch` must have leaves with a lead"):
    trace(lambda batch: 0.0, np.zeros(6))


def test_shards_of_what_all_workers_hold_are_refused():
  split = jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec("data"))
  params = jax.device_put(jnp.ones((8, 2)), split)
  step = jaxmotion.parallelize_step(MESH)(lambda params, batch: params)
  with pytest.raises(ValueError, match=r"float32\[8,2\].*fully_sharded"):
    step(params, BATCH)


def test_means_are_of_scalars_and_of_named_results():
  @functools.partial(jaxmotion.parallelize_step(MESH, mean=["stats"]))
  def step(state, batch):
    stats = 0.9 * state["stats"] + 0.1 * batch.mean(0)
    return {"stats": stats, "kept": state["kept"]}, batch.mean()

  x = jnp.asarray(BATCH["x"])
  state, mean = step({"stats": jnp.ones(3), "kept": jnp.arange(3)}, x)
  np.testing.assert_allclose(state["stats"], 0.9 + 0.1 * x.mean(0), rtol=1e-6)
  np.testing.assert_allclose(mean, x.mean(), rtol=1e-5)
  assert state["kept"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_each_worker_draws_its_own_numbers(make_key):
  @jaxmotion.parallelize_step(MESH)
  def step(kept, key, batch):
    next_key, use = jax.random.split(key)
    drawn = lax.all_gather(jax.random.bits(use), "data")
    old = lax.all_gather(jax.random.bits(kept["key"]), "data")
    return kept, next_key, drawn, old

  kept = {"key": jax.random.key(1)}
  key = make_key(2)
  seen = []
  for _ in range(2):
    kept, key, drawn, old = step(kept, key, np.zeros(4))
    seen += np.asarray(drawn).tolist()
    assert len(set(np.asarray(old).tolist())) == 4
    assert jax.random.key_data(kept["key"]).tolist() == [0, 1]
  assert len(set(seen)) == 8


def test_a_bound_optimizer_is_made_anywhere():
  tx = optax.chain(jaxmotion.exchange("data", INT8), optax.adam(0.1))
  bound = jaxmotion.bind_mesh(tx, MESH)
  expected = transforms.init_state(tx, PARAMS, MESH)
  for init in (bound.init, jax.jit(bound.init)):
    state = init(PARAMS)
    assert_same(state, expected)
  specs = jaxmotion.state_specs(expected, "data")
  mapped = jax.shard_map(
    bound.init, mesh=MESH, in_specs=jax.P(), out_specs=specs
  )
  like = jax.eval_shape(mapped, PARAMS)
  assert jax.tree.map(jnp.shape, like) == jax.tree.map(jnp.shape, expected)
  with pytest.raises(ValueError, match="`axis_name` must be an axis of the"):
    jaxmotion.bind_mesh(tx, MESH, axis_name="date")
