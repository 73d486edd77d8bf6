"""One of two processes that share their work unequally: index, address."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, hetero

UNIT_S = (0.1, 0.3)  # What a microbatch takes on each, as if measured.
X = np.random.default_rng(0).normal(size=(16, 130)).astype(np.float32)


def loss_fn(w, batch):
  errors = (batch["x"] @ w - 1) ** 2
  return jnp.sum(batch["valid"] * errors), jnp.sum(batch["valid"])


def run(mesh, seconds_of, feed):
  """Trains with shares that follow the speeds: counts, losses, parameters."""
  codec = codecs.feedback(codecs.sign())
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.05))
  uneven = hetero.uneven_data_parallel(loss_fn, tx, mesh)
  balance = hetero.rebalance(total=8, workers=2, window=1)
  state, shares = uneven.init(np.zeros(130, np.float32)), balance.init()
  counts, losses = [], []
  for _ in range(4):
    x, valid = hetero.assign_microbatches(
      {"x": X}, shares.counts, microbatch=2, max_microbatches=8
    )
    batch = jax.tree.map(feed, x | {"valid": valid})
    work = uneven.work(state, batch, shares.counts)
    seconds = np.float32(seconds_of(np.array(shares.counts)))
    state, metrics = uneven.update(state, work, feed(seconds))
    shares = balance.update(metrics.seconds.tolist(), shares)
    counts.append(shares.counts)
    losses.append(float(metrics.loss))
  own = np.asarray(state.params.addressable_data(0))
  return [counts, losses, own.astype(float).tolist()]


def main(index, address):
  """Runs as one process of two, which knows only its own time."""
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, 2, index)
  mesh = Mesh(np.array(jax.devices()), ("data",))
  rows = NamedSharding(mesh, P("data"))

  def feed(a):
    own = a[index : index + 1]
    return jax.make_array_from_process_local_data(rows, own, a.shape)

  def seconds_of(counts):
    return np.where(np.arange(2) == index, UNIT_S * counts, np.nan)

  print(json.dumps(run(mesh, seconds_of, feed)))


if __name__ == "__main__":
  main(int(sys.argv[1]), sys.argv[2])
