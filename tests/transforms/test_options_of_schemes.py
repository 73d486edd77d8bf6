import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxmotion
from jaxmotion import presets
from jaxmotion.transforms import gather_params
from tests.meshes import mesh_of

WORKERS = 2
MESH = mesh_of(WORKERS)
PARAMS = {"w": np.float32([[1, -2], [3, 1], [0, 2], [-1, 1]])}
BATCH = np.arange(32, dtype=np.float32).reshape(8, 4) / 16
RATE = 0.125
SGD = optax.sgd(RATE)
EXCHANGED = optax.chain(jaxmotion.exchange("data"), SGD)
SCHEMES = {
  "replicated": EXCHANGED,
  "delayed": jaxmotion.delayed(EXCHANGED),
  "weighted delay": jaxmotion.delayed(EXCHANGED, is_weighted=True),
  "sharded": jaxmotion.sharded("data", SGD),
  "fully sharded": jaxmotion.fully_sharded(SGD),
  "local": jaxmotion.local_updates(
    SGD, optax.chain(jaxmotion.exchange("data"), optax.sgd(1.0)), every=1
  ),
}
WEIGHTED = dict(weight_fn=jnp.sum)
# Options that do not change what the others mean stand together.
OPTIONS = {
  "mean state, aux, key": dict(model_state="mean", has_aux=True),
  "own state, own loss, microbatches": dict(
    model_state="local", mean_loss=False, microbatches=2
  ),
  "weights, program, specs": dict(
    overlap="program", specs=jax.P(), donate=False, **WEIGHTED
  ),
  "weights, counts": dict(microbatches=2, **WEIGHTED),
  "thread": dict(overlap="thread"),
}
REFUSED = {
  ("delayed", "weights, program, specs"): "is_weighted",
  ("delayed", "weights, counts"): "is_weighted",
  ("weighted delay", "mean state, aux, key"): "is_weighted",
  ("weighted delay", "own state, own loss, microbatches"): "is_weighted",
  ("fully sharded", "weights, counts"): "counts",
  **{(name, "thread"): "`overlap` must be 'program'" for name in SCHEMES},
}


def loss_of(w, x):
  return jnp.mean((x @ w - 1) ** 2)


def make_loss(name, option):
  """Makes a loss of the form of an option, whose gradient none changes."""

  def loss_fn(params, *args, key=None):
    *state, batch = args
    w = gather_params(params)["w"] if name == "fully sharded" else params["w"]
    loss = loss_of(w, batch)
    if key is not None:
      loss += jax.random.uniform(key)
    if not state:
      return loss
    # Microbatches hand it on, so that each adds its part of the sum.
    new = jax.tree.map(lambda a: a + batch.sum(), state[0])
    return loss, ((new, {"sum": batch.sum()}) if "aux" in option else new)

  return loss_fn


def run_steps(name, option):
  """(state, result) of as many steps as apply one gradient."""
  init, step = jaxmotion.make_train_step(
    make_loss(name, option), SCHEMES[name], MESH, **OPTIONS[option]
  )
  model_state = [{"total": np.float32(0)}] if "state" in option else []
  state, result, extra = init(PARAMS, *model_state), None, {}
  if "key" in option:
    extra["key"] = jax.random.key(0)
  if "counts" in option:
    extra["counts"] = (1, 2)
  for _ in range(1 + ("delay" in name)):
    state, result = step(state, BATCH, **extra)
  return state, result


def mean_of(function, option):
  """The mean of a function over what workers compute, by its weight."""
  rows = np.split(BATCH, WORKERS)
  if "counts" in option:  # The first worker computes one of its microbatches.
    rows = [rows[0][:2], rows[1][:2], rows[1][2:]]
  weights = [x.sum() if "weights" in option else 1 for x in rows]
  return np.average([function(x) for x in rows], axis=0, weights=weights)


def test_a_delay_inside_of_what_divides_leaves_is_refused():
  scheme = jaxmotion.fully_sharded(jaxmotion.delayed(SGD))
  loss_fn = make_loss("fully sharded", "")
  init, step = jaxmotion.make_train_step(loss_fn, scheme, MESH)
  with pytest.raises(ValueError, match="`jaxmotion.delayed` around"):
    step(init(PARAMS), BATCH)


@pytest.mark.parametrize(
  "name", ["delayed", "fully sharded", "local", "thread"]
)
def test_a_state_of_another_scheme_is_refused(name):
  if name == "thread":  # It looks into the state before a program does.
    options = dict(mesh=mesh_of(1), overlap="thread")
    scheme = jaxmotion.local_updates(SGD, EXCHANGED, every=2, delay=1)
  else:
    options, scheme = dict(mesh=MESH), SCHEMES[name]
  # A key needs a count of steps, which the others look for behind the check.
  key = None if name == "delayed" else jax.random.key(0)
  init, _ = jaxmotion.make_train_step(make_loss("", ""), SGD, MESH)
  _, step = jaxmotion.make_train_step(make_loss(name, ""), scheme, **options)
  with pytest.raises(TypeError, match="`state.*` must be what `init` returned"):
    step(jax.device_get(init(PARAMS)), BATCH, key=key)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", SCHEMES)
def test_an_option_means_the_same_or_is_refused(name, option):
  if (name, option) in REFUSED:
    with pytest.raises(ValueError, match=REFUSED[name, option]):
      run_steps(name, option)
    return
  state, result = run_steps(name, option)
  w, steps = PARAMS["w"], 1 + ("delay" in name)
  grad = mean_of(lambda x: jax.grad(loss_of)(w, x), option)
  found = jaxmotion.read_params(state)["w"]
  np.testing.assert_allclose(found, w - RATE * grad, rtol=1e-5, atol=1e-6)
  loss = result[0] if "aux" in option else result
  expected = mean_of(lambda x: loss_of(w, x), option)
  if "key" in option:
    key = jax.random.fold_in(jax.random.key(0), steps - 1)
    draws = [jax.random.uniform(jax.random.fold_in(key, i)) for i in range(2)]
    assert draws[0] != draws[1]
    expected += np.mean(draws)
  assert loss.shape == ((WORKERS,) if "own loss" in option else ())
  np.testing.assert_allclose(np.mean(loss), expected, rtol=1e-5)
  totals = [half.sum() for half in np.split(BATCH, WORKERS)]
  if "mean state" in option:
    assert float(state.model_state["total"]) == steps * np.mean(totals)
    assert float(result[1]["sum"]) == np.mean(totals)
  if "own state" in option:
    own = state.model_state.value["total"]
    assert own.tolist() == [steps * total for total in totals]


TRAINERS = {
  "TrainState": lambda tx: TrainState.create(
    apply_fn=None, params=PARAMS, tx=tx
  ),
  "nnx.Optimizer": lambda tx: nnx.Optimizer(
    nnx.Dict(w=nnx.Param(PARAMS["w"])), tx, wrt=nnx.Param
  ),
  "optax.chain": lambda tx: optax.chain(tx).init(PARAMS),
}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
  "make_scheme",
  [
    lambda: SCHEMES["local"],
    lambda: SCHEMES["fully sharded"],
    lambda: presets.zeropp(SGD),
  ],
  ids=["local", "fully sharded", "zeropp"],
)
def test_a_trainer_that_is_given_a_scheme_says_what_takes_it(
  trainer, make_scheme
):
  with pytest.raises(TypeError, match="pass the scheme to .*make_train_step"):
    TRAINERS[trainer](make_scheme())
