"""Batches and losses of training steps: what is split, what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import transforms
from tests.meshes import mesh_of

MESH = mesh_of(4)
X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
BATCH = {"x": X, "none": None, "scale": 0.5, "shift": np.float32(2)}
PARAMS = {"w": np.ones((3, 2), np.float32)}
TX = optax.chain(jaxmotion.exchange("data"), optax.sgd(0.1))


def loss_fn(params, batch):
  y = batch["x"] @ transforms.gather_params(params)["w"]
  return jnp.mean((batch["scale"] * y - batch["shift"]) ** 2)


def stateful_loss(params, state, batch):
  return loss_fn(params, batch) + 0 * state.sum(), state


LOCAL = jaxmotion.local_updates(
  optax.sgd(0.1),
  optax.chain(jaxmotion.exchange("data"), optax.sgd(1.0)),
  every=1,
)
FULLY_SHARDED = jaxmotion.fully_sharded(optax.sgd(0.1))
MODES = {
  "exchange": (loss_fn, TX, {}),
  "microbatches": (loss_fn, TX, {"microbatches": 2}),
  "model_state": (stateful_loss, TX, {"model_state": "mean"}),
  "fully_sharded": (loss_fn, FULLY_SHARDED, {"microbatches": 2}),
  "local_updates": (loss_fn, LOCAL, {}),
}


@functools.cache
def make(mode):
  """(parameters -> state, step)."""
  loss, scheme, options = MODES[mode]
  init, step = jaxmotion.make_train_step(loss, scheme, MESH, **options)
  if mode == "model_state":
    return lambda params: init(params, params["w"] + 0), step
  return init, step


def train(mode, batch=BATCH, params=PARAMS):
  init, step = make(mode)
  return step(init(params), batch)[0][0]["w"]


@pytest.mark.parametrize("mode", MODES)
def test_all_workers_get_the_scalars_of_a_batch(mode):
  grads = jax.grad(loss_fn)(PARAMS, BATCH)
  expected = PARAMS["w"] - 0.1 * grads["w"]
  np.testing.assert_allclose(train(mode), expected, rtol=1e-5)


@pytest.mark.parametrize("mode", [m for m in MODES if m != "microbatches"])
def test_arrays_of_another_device_are_put_on_the_mesh_or_refused(mode):
  for device in (0, 7):
    found = train(mode, params=jax.device_put(PARAMS, jax.devices()[device]))
    np.testing.assert_array_equal(found, train(mode))
    assert found.sharding.device_set == set(MESH.devices.flat)
  with pytest.raises(
    ValueError, match="`batch/x` must be on the 4 .*got an array on cpu:0: give"
  ):
    train(mode, BATCH | {"x": jax.device_put(X, jax.devices()[0])})
  placed = jax.device_put(X, jax.NamedSharding(MESH, jax.P("data")))
  np.testing.assert_array_equal(train(mode, BATCH | {"x": placed}), train(mode))


def make_batch(rows_x, rows_y):
  return BATCH | {"x": np.ones((rows_x, 3)), "y": np.ones((rows_y, 1))}


ROWS = "`batch` must have leaves with as many rows as one another, got "
# Of rows of `x` and `y` one would be broadcast, in each part of a batch too.
REFUSED = {
  "`batch` must not hold .* at `key`: gi": BATCH | {"key": jax.random.key(0)},
  ROWS + "12 at `x` and 4 at `y`": make_batch(12, 4),
  r"`batch` must .*got shape \(0, 3\) at `x`": BATCH | {"x": X[:0]},
  r"`batch` must .*got \{\}": {},
  "`batch` must .*got None": None,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_workers_cannot_split_is_refused(mode):
  cases = dict(REFUSED)
  if mode in ("microbatches", "fully_sharded"):
    del cases[ROWS + "12 at `x` and 4 at `y`"]
    cases[ROWS + "24 at `x` and 8 at `y`"] = make_batch(24, 8)
  for message, batch in cases.items():
    with pytest.raises(ValueError, match=message):
      train(mode, batch)


def test_keys_of_the_examples_are_split_and_may_be_one_for_each_worker():
  seen = []

  def loss(params, batch):
    seen.append(batch["key"].shape)
    return loss_fn(params, batch)

  init, step = jaxmotion.make_train_step(loss, TX, MESH)
  for count in (16, 4):
    keys = jax.random.split(jax.random.key(0), count)
    step(init(PARAMS), BATCH | {"key": keys})
  assert set(seen) == {(4,), (1,)}


@pytest.mark.parametrize(
  ("scheme", "result", "message"),
  [
    (TX, lambda loss: loss[None], r"float32\[1\]: average over the examples"),
    (TX, lambda loss: None, "None"),
    (LOCAL, lambda loss: jnp.int32(loss), r"int32\[\]"),
    (
      FULLY_SHARDED,
      lambda loss: (loss, {"a": 1.0}),
      r"float32\[\], .*`has_aux=True`",
    ),
  ],
)
def test_a_loss_that_is_no_scalar_is_refused(scheme, result, message):
  loss = lambda params, batch: result(loss_fn(params, batch))
  init, step = jaxmotion.make_train_step(loss, scheme, MESH)
  state = jax.eval_shape(init, jax.tree.map(jnp.asarray, PARAMS))
  message = "`loss_fn` must return a floating-point scalar, got " + message
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(step, state, BATCH)


def test_a_key_among_the_parameters_is_refused_by_name():
  init, _ = make("exchange")
  with pytest.raises(TypeError, match=r"`params/key` must .* got key<fry>\[\]"):
    init(PARAMS | {"key": jax.random.key(0)})


def add_bonus():
  """A transformation of a user, which reads an argument of its own."""

  def update(updates, state, params=None, *, bonus=0.0, **extra_args):
    return jax.tree.map(lambda u: u + bonus, updates), state

  return optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )


def test_an_extra_argument_that_nothing_reads_is_refused():
  tx = optax.chain(jaxmotion.exchange("data"), add_bonus(), optax.sgd(0.1))
  init, step = jaxmotion.make_train_step(
    lambda w, x: jnp.mean((x - w) ** 2), tx, MESH, donate=False
  )
  state, batch = init(jnp.zeros(())), np.ones(MESH.size, np.float32)
  for name in ("keys", "wieght", "bonuses"):
    with pytest.raises(TypeError, match=f"`{name}` must be an argument of the"):
      step(state, batch, **{name: np.float32(1)})
  new, _ = step(state, batch, bonus=np.float32(1))
  assert float(new.params) == pytest.approx(0.2 - 0.1)
