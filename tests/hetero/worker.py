"""One of two processes of unequal speed: index, count, address."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, hetero

UNIT_S = (0.1, 0.3)  # What a microbatch takes on each, as if measured.
X = np.random.default_rng(0).normal(size=(16, 130)).astype(np.float32)


def loss_fn(w, batch):
  errors = (batch["x"] @ w - 1) ** 2
  return jnp.sum(batch["valid"] * errors) / jnp.sum(batch["valid"])


def run(mesh, find_seconds, feed):
  """Trains with shares that follow the speeds: counts, losses, parameters."""
  codec = codecs.feedback(codecs.sign())
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.05))
  init, step = jaxmotion.make_train_step(
    loss_fn,
    tx,
    mesh,
    weight_fn=lambda batch: jnp.sum(batch["valid"]),
    microbatches=8,
  )
  balance = hetero.rebalance(total=8, workers=2, window=1)
  state, shares = init(np.zeros(130, np.float32)), balance.init()
  counts, losses = [], []
  for _ in range(4):
    x, valid = hetero.assign_microbatches(
      {"x": X}, shares.counts, microbatch=2, max_microbatches=8
    )
    batch = jax.tree.map(feed, x | {"valid": valid})
    state, loss = step(state, batch, counts=shares.counts)
    seconds = find_seconds(np.array(shares.counts))
    shares = balance.update(seconds.tolist(), shares)
    counts.append(shares.counts)
    losses.append(float(loss))
  own = np.asarray(state.params.addressable_data(0))
  return [counts, losses, own.astype(float).tolist()]


def main(index, address):
  """Runs as one process of two, which knows only its own time."""
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, 2, index)
  mesh = Mesh(np.array(jax.devices()), ("data",))
  rows = NamedSharding(mesh, P("data"))

  def feed(a):
    own = np.split(a, 2)[index]
    return jax.make_array_from_process_local_data(rows, own, a.shape)

  def find_seconds(counts):
    return multihost_utils.process_allgather(UNIT_S[index] * counts[index])

  print(json.dumps(run(mesh, find_seconds, feed)))


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[3])
