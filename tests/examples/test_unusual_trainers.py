"""Trainers of unusual kinds, plain on one device and compressed on four."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from optax import contrib

import jaxmotion
from examples.parts import apply_network as apply, cross_entropy, init_params
from jaxmotion import codecs

MESH = jax.sharding.Mesh(jax.devices()[:4], ("data",))
INT8 = codecs.feedback(codecs.uniform(bits=8, block=16))
STEPS = 4


def make_batches():
  rng = np.random.default_rng(0)
  return [
    {
      "x": rng.normal(size=(16, 6)).astype(np.float32),
      "y": rng.integers(0, 4, 16).astype(np.int32),
    }
    for _ in range(STEPS)
  ]


def loss_fn(params, batch):
  return cross_entropy(apply(params, batch["x"]), batch["y"])


def make_adam(wrap, value_and_grad, loss_fn=loss_fn):
  """Returns Adam and its step.

  Args:
    wrap: makes the optimizer that is used from another one.
    value_and_grad: takes the gradients.
    loss_fn: (params, batch) -> loss.
  """
  tx = wrap(optax.adam(0.01))

  @jax.jit
  def step(params, opt_state, batch):
    _, grads = value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return tx, step


def train_adam(wrap, value_and_grad, params, loss_fn):
  tx, step = make_adam(wrap, value_and_grad, loss_fn)
  opt_state = tx.init(params)
  for batch in make_batches():
    params, opt_state = step(params, opt_state, batch)
  return params


def train_by_optimizers(wrap, value_and_grad):
  """Optimizers with copies, averages and rates among their state."""
  adam = optax.inject_hyperparams(optax.adam)
  kinds = {
    "accumulated": optax.MultiSteps(optax.adam(0.01), 2),
    "injected": adam(learning_rate=0.01),
    "lookahead": optax.sgd(0.01),
    "muon": contrib.muon(0.01),
    "schedule_free": contrib.schedule_free_adamw(0.01, warmup_steps=2),
    "prodigy": contrib.prodigy(),
  }
  txs = {name: wrap(tx) for name, tx in kinds.items()}
  txs["lookahead"] = optax.lookahead(txs["lookahead"], 2, 0.5)

  @jax.jit
  def step(params, states, mean, batch):
    for name, tx in txs.items():
      fast = getattr(params[name], "fast", params[name])
      _, grads = value_and_grad(loss_fn)(fast, batch)
      updates, states[name] = tx.update(grads, states[name], params[name])
      params[name] = optax.apply_updates(params[name], updates)
    return params, states, optax.incremental_update(params, mean, 0.1)

  params = {name: init_params(6) for name in txs}
  synced = optax.LookaheadParams.init_synced(params["lookahead"])
  params["lookahead"] = synced
  states = {name: tx.init(params[name]) for name, tx in txs.items()}
  mean = params
  for i, batch in enumerate(make_batches()):
    # From outside, as a schedule of the loop does.
    rates = optax.tree.get(states["injected"], "hyperparams")
    rates["learning_rate"] = 0.01 / (i + 1)
    params, states, mean = step(params, states, mean, batch)
  return params, mean


def train_several_steps(wrap, value_and_grad):
  """One call of several steps: a scan over a step."""
  tx, step = make_adam(wrap, value_and_grad)

  @jax.jit
  def run(params, opt_state, batches):
    def body(carry, batch):
      return step(*carry, batch), None

    return lax.scan(body, (params, opt_state), batches)[0]

  params = init_params(6)
  batches = jax.tree.map(lambda *leaves: np.stack(leaves), *make_batches())
  return run(params, tx.init(params), batches)[0]


def train_with_loss_scale(wrap, value_and_grad):
  """Scales losses up, and skips a step whose gradient overflows."""
  tx = wrap(optax.adam(0.01))

  @jax.jit
  def step(params, opt_state, scale, batch):
    scaled_loss = lambda params, batch: scale * loss_fn(params, batch)
    _, grads = value_and_grad(scaled_loss)(params, batch)
    grads = jax.tree.map(lambda g: g / scale, grads)
    updates, new_state = tx.update(grads, opt_state, params)
    finite = jnp.isfinite(optax.tree.norm(updates))
    new = optax.apply_updates(params, updates), new_state
    kept = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), new, (params, opt_state)
    )
    return *kept, jnp.where(finite, 2 * scale, scale / 2), finite

  params, scale = init_params(6), jnp.float32(2**15)
  opt_state = tx.init(params)
  finites = []
  for i, batch in enumerate(make_batches()):
    if i == 1:
      batch["x"][-1] = np.inf
    params, opt_state, scale, finite = step(params, opt_state, scale, batch)
    finites.append(bool(finite))
  assert finites == [True, False, True, True]
  return params, scale


class _Layer(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return nn.tanh(nn.Dense(6)(x)), None


class _ScannedNetwork(nn.Module):
  @nn.compact
  def __call__(self, x):
    layers = nn.scan(
      nn.remat(_Layer),
      variable_axes={"params": 0},
      split_rngs={"params": True},
      length=3,
    )
    x, _ = layers(name="layers")(x, None)
    return nn.Dense(4)(x)


def train_scanned_layers(wrap, value_and_grad):
  """Layers of Linen that `nn.scan` stacks, each computed again backward."""
  network = _ScannedNetwork()

  def loss_fn(params, batch):
    return cross_entropy(network.apply(params, batch["x"]), batch["y"])

  params = jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, 6)))
  return train_adam(wrap, value_and_grad, params, loss_fn)


def train_partitioned_module(wrap, value_and_grad):
  """Arrays of a module of Equinox, with None in the place of a function."""

  def loss_fn(arrays, batch):
    module = {**arrays, "activation": jax.nn.relu}
    hidden = module["activation"](batch["x"] @ module["first"])
    return cross_entropy(hidden @ module["last"], batch["y"])

  arrays = {**init_params(6), "activation": None}
  return train_adam(wrap, value_and_grad, arrays, loss_fn)


@pytest.mark.parametrize(
  ("train", "codec", "tolerance"),
  [
    (train_by_optimizers, codecs.identity(), 1e-6),
    (train_several_steps, INT8, 5e-3),
    (train_with_loss_scale, INT8, 5e-3),
    (train_scanned_layers, codecs.identity(), 1e-6),
    (train_partitioned_module, INT8, 5e-3),
  ],
)
def test_compression_changes_little(train, codec, tolerance):
  def wrap(tx):
    return optax.chain(jaxmotion.exchange("data", codec), tx)

  expected = train(lambda tx: tx, jax.value_and_grad)
  with jax.set_mesh(MESH):
    found = train(wrap, jaxmotion.value_and_grad)
  for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    error = np.abs(np.asarray(a) - np.asarray(b)).max()
    assert error <= tolerance * np.abs(b).max()
