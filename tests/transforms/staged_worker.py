"""One of two processes, which trains with threads and without: see `main`."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import jaxmotion
from jaxmotion import codecs
from jaxmotion.collectives import _pieces
from jaxmotion.program import _stages
from tests.transforms import worker

WIDTH = 64
CODECS = {
  "sums": codecs.identity(),
  "memory": codecs.feedback(codecs.uniform(bits=4, block=64)),
}
LAYERS = [f"layer{i}" for i in range(3)]


def loss_fn(params, batch):
  y = batch["x"]
  for name in LAYERS:
    y = jnp.tanh(y @ params[name])
  return jnp.mean(y**2)


def train(mesh, codec, overlap):
  # Products with powers of two are exact, however XLA fuses them.
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.125, 0.5))
  init, step = jaxmotion.data_parallel(loss_fn, tx, mesh, overlap=overlap)
  rng = np.random.default_rng(0)
  state = init(
    {n: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for n in LAYERS}
  )
  rows = rng.normal(size=(8, WIDTH)).astype(np.float32)
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  batch = {
    "x": jax.make_array_from_callback(rows.shape, sharding, lambda i: rows[i])
  }
  for _ in range(3):
    *state, loss = step(*state, batch)
  # Error memory is a worker's own: its hash must not be the other's.
  return worker.describe_state((state[0], loss)), worker.describe_state(
    state[1]
  )


def main(index, processes, address):
  worker.join_job(index, processes, address, 1)
  _pieces._MIN_PIECE_BYTES = 64
  _stages._MIN_GROUP_BYTES = 16
  mesh = jax.make_mesh((processes,), ("data",), axis_types=(AxisType.Auto,))
  found = {
    name: {how: train(mesh, codec, how) for how in ("program", "thread")}
    for name, codec in CODECS.items()
  }
  print(json.dumps(found))


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
