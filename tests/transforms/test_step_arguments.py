"""Batches and losses of training steps: what is split, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import transforms

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
BATCH = {"x": X, "none": None, "scale": 0.5, "shift": np.float32(2)}
PARAMS = {"w": np.ones((3, 2), np.float32)}
TX = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))


def loss_fn(params, batch):
  y = batch["x"] @ transforms.gather_params(params)["w"]
  return jnp.mean((batch["scale"] * y - batch["shift"]) ** 2)


def plain_loss(params, batch):
  y = batch["x"] @ params["w"]
  return jnp.mean((batch["scale"] * y - batch["shift"]) ** 2)


def train_by_exchange(batch, **options):
  init, step = jaxmotion.make_train_step(plain_loss, TX, MESH, **options)
  return step(init(PARAMS), batch)[0].params


def train_in_microbatches(batch):
  return train_by_exchange(batch, microbatches=2)


def train_fully_sharded(batch):
  init, step = jaxmotion.make_train_step(
    loss_fn, jaxmotion.fully_sharded(optax.sgd(0.1)), MESH, microbatches=2
  )
  return step(init(PARAMS), batch)[0].params


def train_by_local_updates(batch):
  outer = optax.chain(jaxmotion.exchange("data"), optax.sgd(1.0))
  init, step = jaxmotion.make_train_step(
    plain_loss, jaxmotion.local_updates(optax.sgd(0.1), outer, every=1), MESH
  )
  return step(init(PARAMS), batch)[0].params


def train_a_step_of_ones_own(batch):
  tx = jaxmotion.bind_mesh(TX, MESH)

  @jaxmotion.parallelize_step(MESH)
  def step(params, opt_state, batch):
    grads = jax.grad(plain_loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return step(PARAMS, tx.init(PARAMS), batch)[0]


TRAINERS = [
  train_by_exchange,
  train_in_microbatches,
  train_fully_sharded,
  train_by_local_updates,
  train_a_step_of_ones_own,
]


@pytest.mark.parametrize("train", TRAINERS)
def test_all_workers_get_the_scalars_of_a_batch(train):
  grads = jax.grad(plain_loss)(PARAMS, BATCH)
  expected = PARAMS["w"] - 0.1 * grads["w"]
  np.testing.assert_allclose(train(BATCH)["w"], expected, rtol=1e-5)


@pytest.mark.parametrize("train", TRAINERS)
def test_one_key_for_all_workers_is_refused_in_a_batch(train):
  with pytest.raises(ValueError, match="`batch` must not hold .* at `key`: gi"):
    train(BATCH | {"key": jax.random.key(0)})


# Rows of `x` and `y` of which one would be broadcast, in each part of a batch.
ROWS = dict.fromkeys(TRAINERS, (12, 4)) | {
  train_in_microbatches: (24, 8),
  train_fully_sharded: (24, 8),
}


def make_batch(rows_x, rows_y):
  return BATCH | {"x": np.ones((rows_x, 3)), "y": np.ones((rows_y, 1))}


@pytest.mark.parametrize("train", TRAINERS)
def test_leaves_with_other_numbers_of_rows_are_refused(train):
  rows_x, rows_y = ROWS[train]
  message = (
    "`batch` must have leaves with as many rows as one another, got "
    f"{rows_x} at `x` and {rows_y} at `y`"
  )
  with pytest.raises(ValueError, match=message):
    train(make_batch(rows_x, rows_y))


@pytest.mark.parametrize("train", TRAINERS[:-1])
@pytest.mark.parametrize(
  ("batch", "got"),
  [
    (BATCH | {"x": X[:0]}, r"got shape \(0, 3\) at `x`"),
    ({}, r"got \{\}"),
    (None, "got None"),
  ],
)
def test_a_batch_without_rows_is_refused(train, batch, got):
  with pytest.raises(ValueError, match=f"`batch` must .*{got}"):
    train(batch)


def test_arguments_of_a_step_of_ones_own_may_have_other_numbers_of_rows():
  @jaxmotion.parallelize_step(MESH, batch=("batch", "table", "extra"))
  def step(params, batch, table, extra=None):
    return {"loss": plain_loss(params, batch) + jnp.sum(table)}

  table = np.ones((4, 2), np.float32)
  step(PARAMS, BATCH, table)
  with pytest.raises(ValueError, match="`batch` .* 12 at `x` and 4 at `y`"):
    step(PARAMS, make_batch(12, 4), table)
  with pytest.raises(ValueError, match=r"`table` must .* got shape \(0, 2\)"):
    step(PARAMS, BATCH, table[:0])
  with pytest.raises(ValueError, match=r"`table` must .* got \{\}"):
    step(PARAMS, BATCH, {})


def test_keys_of_the_examples_are_split_and_may_be_one_for_each_worker():
  seen = []

  def loss(params, batch):
    seen.append(batch["key"].shape)
    return plain_loss(params, batch)

  init, step = jaxmotion.make_train_step(loss, TX, MESH)
  for count in (16, 4):
    keys = jax.random.split(jax.random.key(0), count)
    step(init(PARAMS), BATCH | {"key": keys})
  assert set(seen) == {(4,), (1,)}


def test_an_argument_that_workers_do_not_divide_is_named():
  @jaxmotion.parallelize_step(MESH, batch=["x", "y"])
  def step(params, x, y):
    return jnp.mean(params * x * y)

  with pytest.raises(ValueError, match="`y` must have .* got shape \\(6,\\)"):
    step(1.0, np.ones(8), np.ones(6))


@pytest.mark.parametrize("build", ["exchange", "fully_sharded", "local"])
@pytest.mark.parametrize(
  ("result", "message"),
  [
    (lambda loss: loss[None], r"got float32\[1\]: average over the examples"),
    (lambda loss: (loss, {"a": 1.0}), r"got float32\[\], .*`has_aux=True`"),
    (lambda loss: jnp.int32(loss), r"got int32\[\]"),
    (lambda loss: None, "got None"),
  ],
)
def test_a_loss_that_is_no_scalar_is_refused(build, result, message):
  def loss_fn(params, batch):
    return result(jnp.mean(batch["x"] @ transforms.gather_params(params)["w"]))

  outer = optax.chain(jaxmotion.exchange("data"), optax.sgd(1.0))
  schemes = {
    "exchange": TX,
    "fully_sharded": jaxmotion.fully_sharded(optax.sgd(0.1)),
    "local": jaxmotion.local_updates(optax.sgd(0.1), outer, every=1),
  }
  init, step = jaxmotion.make_train_step(loss_fn, schemes[build], MESH)
  state = init(PARAMS)
  with pytest.raises(ValueError, match="`loss_fn` must return .*" + message):
    jax.eval_shape(step, state, BATCH)


def test_a_key_among_the_parameters_is_refused_by_name():
  init, _ = jaxmotion.make_train_step(plain_loss, TX, MESH)
  with pytest.raises(TypeError, match=r"`params/key` must .* got key<fry>\[\]"):
    init(PARAMS | {"key": jax.random.key(0)})


def add_bonus():
  """A transformation of a user, which reads an argument of its own."""

  def update(updates, state, params=None, *, bonus=0.0, **extra_args):
    return jax.tree.map(lambda u: u + bonus, updates), state

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )


@pytest.mark.parametrize("name", ["keys", "wieght", "bonuses"])
def test_an_extra_argument_that_nothing_reads_is_refused(name):
  tx = optax.chain(jaxmotion.exchange("data"), add_bonus(), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(
    lambda w, x: jnp.mean((x - w) ** 2), tx, MESH, donate=False
  )
  state, batch = init(jnp.zeros(())), np.ones(MESH.size, np.float32)
  with pytest.raises(TypeError, match=f"`{name}` must be an argument of the"):
    step(state, batch, **{name: np.float32(1)})
  new, _ = step(state, batch, bonus=np.float32(1))
  assert float(new.params) == pytest.approx(0.2 - 0.1)
