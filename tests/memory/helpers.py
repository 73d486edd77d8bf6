"""Small models as stages, and a hook that records the ops of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import codecs, memory

WIDTH = 32
PLAIN = {"weights": codecs.identity(), "grads": codecs.identity()}
# One object each, so that tests share the compiled updates.
ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
HOST, DEVICE = jax.devices()[0], jax.devices()[1]


def first(params, x, batch):
  return jnp.tanh(batch["x"] @ params["w"] + params["b"])


def block(params, x, batch):
  return x + jnp.tanh(x @ params["w"] + params["b"])


def last(params, x, batch):
  return jnp.mean((x @ params["w"] - batch["y"]) ** 2)


def stages_of(blocks=1):
  middle = [(f"block{i}", block) for i in range(blocks)]
  return [("first", first), *middle, ("last", last)]


def params_of(blocks=1, seed=0):
  rng = np.random.default_rng(seed)

  def make_weight(outputs=WIDTH):
    return rng.normal(0, 0.2, (WIDTH, outputs)).astype(np.float32)

  def make_dense():
    return {"w": make_weight(), "b": make_weight(1).T}

  middle = {f"block{i}": make_dense() for i in range(blocks)}
  return {"first": make_dense(), **middle, "last": {"w": make_weight(WIDTH)}}


def batch_of(seed=1):
  rng = np.random.default_rng(seed)
  x, y = rng.normal(size=(2, 8, WIDTH)).astype(np.float32)
  return {"x": x, "y": y}


def model_of(blocks=1, tx=None, **options):
  """Returns a model on the second device; matrices alone are encoded."""
  options = {"min_leaf_size": WIDTH**2, "device": DEVICE, **options}
  tx = ADAM if tx is None else tx
  return memory.HostResident(stages_of(blocks), tx, **options)


def whole_loss(params, batch):
  x = None
  for name, fn in stages_of(len(params) - 2):
    x = fn(params[name], x, batch)
  return x


def make_update(tx):
  """Returns a jitted update of parameters by float32 gradients."""

  @jax.jit
  def update(params, opt_state, grads):
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  return update


def tree_bits(tree):
  return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def copy_tree(tree):
  """Returns NumPy copies, because the next step donates the arrays."""
  return jax.tree.map(np.array, tree)


def record_step(model, state, batch, level=0):
  """Runs a step; returns its state and each op as (name, arguments, result)."""
  seen = []

  def run_op(name, op, *args):
    out = op(*args)
    seen.append((name, args, out))
    return out

  state, _ = model.step(state, batch, level, run_op=run_op)
  return state, seen


def record_first_step(blocks=1, **options):
  """Returns the state after the first step of a model, and the step's ops."""
  model = model_of(blocks, **options)
  return record_step(model, model.init(params_of(blocks)), batch_of())
