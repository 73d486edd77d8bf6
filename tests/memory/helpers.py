"""Small models as stages, and what a step is seen to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import codecs, memory

WIDTH = 32
PLAIN = {"weights": codecs.identity(), "grads": codecs.identity()}
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

  def weight(outputs=WIDTH):
    return rng.normal(0, 0.2, (WIDTH, outputs)).astype(np.float32)

  def dense():
    return {"w": weight(), "b": weight(1).T}

  middle = {f"block{i}": dense() for i in range(blocks)}
  return {"first": dense(), **middle, "last": {"w": weight(WIDTH)}}


def batch_of(seed=1):
  rng = np.random.default_rng(seed)
  x, y = rng.normal(size=(2, 8, WIDTH)).astype(np.float32)
  return {"x": x, "y": y}


def model_of(blocks=1, tx=None, **options):
  options = {"min_leaf_size": WIDTH + 1, "device": DEVICE, **options}
  tx = optax.adam(1e-2) if tx is None else tx
  return memory.HostResident(stages_of(blocks), tx, **options)


def whole_loss(params, batch):
  x = None
  for name, fn in stages_of(len(params) - 2):
    x = fn(params[name], x, batch)
  return x


def bits(tree):
  return [np.asarray(a).tobytes() for a in jax.tree.leaves(tree)]


def copies(tree):
  """NumPy copies: the next step donates the arrays."""
  return jax.tree.map(np.array, tree)


def recorder():
  """A `call` that notes (name, arguments, result) of every piece."""
  seen = []

  def call(name, piece, *args):
    out = piece(*args)
    seen.append((name, args, out))
    return out

  return seen, call
