"""Trains a network on 4 workers with gradients in 4 bits.

  python examples/quickstart.py

The workers are CPU devices that one process emulates. On real hosts or GPUs,
leave the line with `jax_num_cpu_devices` out.
"""

import jax
import numpy as np
import optax

import jaxmotion
from jaxmotion import codecs, wire

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)


def loss_fn(params, batch):
  """Returns the mean loss of one worker's part of the batch."""
  hidden = jax.nn.relu(batch["x"] @ params["hidden"])
  logits = hidden @ params["out"]
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, batch["y"]
  ).mean()


def make_batch(rng):
  """Returns points around 10 centers, and which center each belongs to."""
  y = rng.integers(0, 10, 256)
  x = np.eye(10, 64)[y] + 0.3 * rng.normal(size=(256, 64))
  return {"x": x.astype(np.float32), "y": y}


def main():
  """Trains 50 steps and prints the losses and the bytes."""
  rng = np.random.default_rng(0)
  mesh = jax.make_mesh((4,), ("data",))
  codec = codecs.feedback(codecs.uniform(bits=4))
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.5, 0.9))
  init, step = jaxmotion.make_train_step(loss_fn, tx, mesh)
  params = {
    "hidden": rng.normal(size=(64, 512)).astype(np.float32) / 8,
    "out": rng.normal(size=(512, 10)).astype(np.float32) / 20,
  }
  plain = sum(a.size for a in params.values()) * 4
  state = init(params)
  for i in range(50):
    state, loss = step(state, make_batch(rng))
    if i % 10 == 9:
      print(f"step {i + 1}: loss {float(loss):.4f}")
  sent = wire.payload_bytes(codec, params)
  print(f"a gradient takes {sent:,} bytes instead of {plain:,}")


if __name__ == "__main__":
  main()
