"""Trains a network as one of several islands, which meet in a folder.

  python examples/islands.py FOLDER

Start it in several terminals, at any time. An island that is killed is not
waited for, and one that comes later goes on where the others are. With
`s3://bucket/run` in place of the folder, islands run on machines that have no
network between them.
"""

import os
import sys

import jax
import numpy as np
import optax

from jaxmotion import codecs, islands


def loss_fn(params, batch):
  """Returns the mean loss of a batch."""
  hidden = jax.nn.relu(batch["x"] @ params["hidden"])
  logits = hidden @ params["out"]
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, batch["y"]
  ).mean()


def make_batch(rng):
  """Returns points around 10 centers, and which center each belongs to."""
  y = rng.integers(0, 10, 64)
  x = np.eye(10, 64)[y] + 0.3 * rng.normal(size=(64, 64))
  return {"x": x.astype(np.float32), "y": y}


def init_params():
  """Returns small random parameters."""
  rng = np.random.default_rng(0)
  return {
    "hidden": rng.normal(size=(64, 128)).astype(np.float32) / 8,
    "out": rng.normal(size=(128, 10)).astype(np.float32) / 11,
  }


def train(store, steps=200):
  """Trains on data of its own and prints what the island sees."""
  tx = optax.adamw(1e-3)

  @jax.jit
  def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  # These lines make the trainer an island, beside `island.step` below.
  codec = codecs.feedback(codecs.uniform(bits=4))
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
  island = islands.join(store, init_params(), outer, codec=codec, every=10)
  params = island.start()

  opt_state, rng = tx.init(params), np.random.default_rng(os.getpid())
  for i in range(steps):
    batch = make_batch(rng)
    params, opt_state, loss = train_step(params, opt_state, batch)
    params = island.step(params, tokens=len(batch["y"]))
    if i % 20 == 19:
      print(f"step {i + 1}, round {island.round}: loss {float(loss):.4f}")
  island.stop()
  print(f"loss of the anchor: {loss_fn(island.anchor, make_batch(rng)):.4f}")


if __name__ == "__main__":
  train(sys.argv[1])
