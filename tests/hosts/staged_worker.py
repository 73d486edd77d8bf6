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
from jaxmotion.hosts import Sender, _sending, _staged_step, _stages
from jaxmotion.hosts._staged_step import measure_swap_bytes
from tests.transforms import worker

WIDTH = 32
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


def train(mesh, codec, overlap, swap_bytes=0.0):
  _staged_step.measure_swap_bytes = lambda *_: swap_bytes
  # Products with powers of two are exact, however XLA fuses them.
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.125, 0.5))
  init, step = jaxmotion.make_train_step(loss_fn, tx, mesh, overlap=overlap)
  rng = np.random.default_rng(0)
  state = init(
    {n: rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8 for n in LAYERS}
  )
  rows = rng.normal(size=(8, WIDTH)).astype(np.float32)
  sharding = jax.NamedSharding(mesh, jax.P("data"))
  batch = {
    "x": jax.make_array_from_callback(rows.shape, sharding, lambda i: rows[i])
  }
  for _ in range(2):
    state, loss = step(state, batch)
  # Error memory is a worker's own: its hash must not be the other's.
  shared, own = (state.params, loss), state.opt_state
  return worker.describe_state(shared), worker.describe_state(own)


def main(index, processes, address):
  worker.join_job(index, processes, address, 1)
  _sending._MIN_PIECE_BYTES = 64
  _stages._MIN_GROUP_BYTES = 16
  mesh = jax.make_mesh((processes,), ("data",), axis_types=(AxisType.Auto,))
  sums, memory = CODECS.values()
  found = {
    "sums": {"program": train(mesh, sums, "program")},
    "memory": {
      "program": train(mesh, memory, "program"),
      "thread": train(mesh, memory, "thread"),
      "swaps": train(mesh, memory, "thread", float("inf")),
    },
  }
  with jax.set_mesh(mesh):
    found["sums"]["thread"] = train(mesh, sums, "thread")
  swap_bytes = measure_swap_bytes(mesh, Sender(mesh))
  print(json.dumps(found | {"swap_bytes": swap_bytes}))


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
