"""An exchange inside, around and behind other transformations of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax

import jaxmotion
from jaxmotion import codecs, transforms, wire
from tests.meshes import mesh_of
from tests.transforms.helpers import assert_close, bits, train

WORKERS = 4
MESH = mesh_of(WORKERS)
PARAMS = {"base": jnp.ones((8, 8)), "lora": jnp.full((8, 2), 0.1)}
RNG = np.random.default_rng(0)
BATCH = (
  RNG.normal(size=(8, 8)).astype(np.float32),
  RNG.normal(size=(8, 2)).astype(np.float32),
)
CODEC = codecs.feedback(codecs.uniform(bits=8, block=4))


def loss_fn(params, batch):
  x, y = batch
  return jnp.mean((x @ params["base"] @ params["lora"] - y) ** 2)


def chain(*rest, codec=CODEC):
  return optax.chain(jaxmotion.exchange("data", codec), *rest)


def by_label(train):
  labels = {"base": "freeze", "lora": "train"}
  return optax.partition(
    {"train": train, "freeze": optax.set_to_zero()}, labels
  )


def make(tx):
  init, step = jaxmotion.make_train_step(loss_fn, tx, MESH, donate=False)
  return step, init(PARAMS)


@pytest.fixture(scope="module")
def lora_alone():
  """(parameters, bytes of a step) if nothing else is a parameter."""

  def loss(params, batch):
    return loss_fn({"base": PARAMS["base"], **params}, batch)

  init, step = jaxmotion.make_train_step(
    loss, chain(optax.adam(0.1)), MESH, donate=False
  )
  state = init({"lora": PARAMS["lora"]})
  new, _ = step(state, BATCH)
  return new.params, wire.step_bytes(step, state, BATCH).total_bytes


def masked(train):
  frozen = {"base": True, "lora": False}
  return optax.chain(
    optax.masked(train, {"base": False, "lora": True}),
    optax.masked(optax.set_to_zero(), frozen),
  )


@pytest.mark.parametrize("wrap", [by_label, masked])
def test_frozen_leaves_stay_and_send_nothing(wrap, lora_alone):
  expected, wire_bytes = lora_alone
  step, state = make(wrap(chain(optax.adam(0.1))))
  params = step(state, BATCH)[0].params
  assert bits(params["base"]) == bits(PARAMS["base"])
  np.testing.assert_allclose(params["lora"], expected["lora"], rtol=1e-6)
  assert wire.step_bytes(step, state, BATCH).total_bytes == wire_bytes


@pytest.mark.parametrize("own", ["passed on", "by worker"])
def test_an_update_that_differs_between_workers_is_refused(own):
  def update(updates, state, params=None):
    offset = lax.axis_index("data") * 1.0
    return jax.tree.map(lambda a: jnp.zeros_like(a) + offset, updates), state

  by_worker = optax.GradientTransformation(lambda p: optax.EmptyState(), update)
  rest = by_worker if own == "by worker" else optax.identity()
  labels = {"base": "rest", "lora": "train"}
  step, state = make(
    optax.partition({"train": chain(optax.sgd(0.1)), "rest": rest}, labels)
  )
  with pytest.raises(ValueError, match="got `params/base` that differs.*zero"):
    step.eval_shape(state, BATCH)


@pytest.mark.parametrize(
  ("wrap", "remedy"),
  [
    (
      lambda tx: optax.MultiSteps(tx, 2),
      "MultiSteps, .* put MultiSteps behind",
    ),
    (lambda tx: optax.apply_if_finite(tx, 3), "use jaxmotion.skip_nonfinite"),
    (
      lambda tx: optax.conditionally_mask(tx, lambda step: step < 3),
      "conditionally_mask, .* exchange first",
    ),
    (
      lambda tx: optax.conditionally_transform(tx, lambda step: step < 3),
      "conditionally_transform, .* exchange first",
    ),
  ],
)
def test_an_exchange_that_does_not_always_run_is_refused(wrap, remedy):
  with pytest.raises(ValueError, match=remedy):
    make(wrap(chain(optax.sgd(0.1))))
  if not isinstance(wrap(optax.identity()), optax.MultiSteps):
    tx = optax.chain(wrap(chain()), optax.sgd(0.1))
    with pytest.raises(ValueError, match=remedy):
      transforms.bind_mesh(tx, MESH).init(PARAMS)


def test_state_before_the_exchange_is_each_workers_own():
  momentum = optax.trace(0.9)
  step, state = make(optax.chain(momentum, chain(optax.sgd(0.1))))
  with pytest.raises(ValueError, match="`opt_state/0/trace/base` .*per_worker"):
    step.eval_shape(state, BATCH)
  own = jaxmotion.per_worker(momentum, "data")
  local, state, _ = train(
    loss_fn,
    optax.chain(own, chain(optax.sgd(0.1), codec=None)),
    MESH,
    PARAMS,
    BATCH,
  )
  plain = chain(momentum, optax.sgd(0.1), codec=None)
  shared, _, _ = train(loss_fn, plain, MESH, PARAMS, BATCH)
  assert_close(local, shared, rtol=1e-4)
  trace = state[0].inner.value.trace["lora"]
  assert trace.shape == (WORKERS, 8, 2)
  assert len({row.tobytes() for row in np.asarray(trace)}) == WORKERS


def test_a_chain_that_needs_the_loss_gets_the_workers_mean():
  step, state = make(chain(optax.polyak_sgd(), codec=None))
  told, loss = step(state, BATCH)
  init, without = jaxmotion.make_train_step(
    loss_fn, chain(optax.polyak_sgd(), codec=None), MESH, mean_loss=False
  )
  with pytest.raises(TypeError, match=r"(?s)'value'.*`step\(\.\.\., name=\)`"):
    without.eval_shape(state, BATCH)
  given, _ = without(init(PARAMS), BATCH, value=loss)
  np.testing.assert_allclose(
    told.params["lora"], given.params["lora"], rtol=1e-6
  )


def test_one_that_takes_no_extra_arguments_gets_none():
  sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))
  step, state = make(chain(optax.GradientTransformation(*sam)))
  step.eval_shape(state, BATCH)
  # It says that it takes them, and refuses those that it does not know.
  step, state = make(chain(sam))
  with pytest.raises(TypeError, match=r"optax\.GradientTransformation\(\*tx\)"):
    step.eval_shape(state, BATCH)


def test_a_line_search_is_refused_and_lbfgs_without_one_is_not():
  step, state = make(chain(optax.lbfgs()))
  with pytest.raises(
    TypeError, match="without a line search, .*linesearch=None"
  ):
    step.eval_shape(state, BATCH)
  with pytest.raises(TypeError, match="`value_fn` must be a tree of arrays"):
    step(state, BATCH, value_fn=loss_fn)
  step, state = make(chain(optax.lbfgs(0.1, linesearch=None)))
  step.eval_shape(state, BATCH)


def test_a_parameter_without_a_gradient_is_named():
  init, _ = jaxmotion.make_train_step(loss_fn, chain(optax.sgd(0.1)), MESH)
  for leaf in (np.zeros(3, np.int32), True, np.int64(1)):
    with pytest.raises(TypeError, match="`params/table/0` must be a floating"):
      init({**PARAMS, "table": [leaf]})
