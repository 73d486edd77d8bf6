"""Trains on all hosts of a cluster; started once on each.

`slurm.sh`, `jobset.yaml` and `ray_trainer.py` start it. jax.distributed joins
the processes, and XLA's collectives carry the payloads.
"""

import os

import jax
import numpy as np
import optax

import jaxmotion
from jaxmotion import codecs

ROWS = 64  # Of each device.


def loss_fn(params, batch):
  """Returns the mean loss of one worker's part of the batch."""
  hidden = jax.nn.relu(batch["x"] @ params["hidden"])
  logits = hidden @ params["out"]
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, batch["y"]
  ).mean()


def load_batch(rng, mesh):
  """Returns a batch of which each process loads its own rows only."""
  count = ROWS * jax.local_device_count()
  y = rng.integers(0, 10, count)
  x = np.eye(10, 64)[y] + 0.3 * rng.normal(size=(count, 64))
  rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
  own = {"x": x.astype(np.float32), "y": y.astype(np.int32)}
  return jax.tree.map(
    lambda a: jax.make_array_from_process_local_data(rows, a), own
  )


def train(steps=100):
  """Trains, and logs what the exchange does from the first process.

  Args:
    steps: number of steps.

  Returns:
    The last loss.
  """
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  codec = codecs.feedback(codecs.uniform(bits=4))
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.sgd(0.1, 0.9))
  init, step = jaxmotion.make_train_step(loss_fn, tx, mesh)
  shared = np.random.default_rng(0)  # The same parameters on all hosts.
  state = init(
    {
      "hidden": shared.normal(size=(64, 512)).astype(np.float32) / 8,
      "out": shared.normal(size=(512, 10)).astype(np.float32) / 20,
    }
  )
  own = np.random.default_rng(1 + jax.process_index())  # Other rows on each.
  for i in range(1, steps + 1):
    state, loss = step(state, load_batch(own, mesh))
    if i % 10 == 0:  # All processes read the metrics; one prints them.
      log = {"loss": loss, **jaxmotion.metrics(state.opt_state)}
      if jax.process_index() == 0:
        print({name: round(float(value), 4) for name, value in log.items()})
  return float(loss)


def join_job():
  """Joins this process to its job."""
  index = os.environ.get("JOB_COMPLETION_INDEX")
  if index is None:
    jax.distributed.initialize()  # Slurm and Open MPI tell JAX all it needs.
    return
  jax.distributed.initialize(  # What jobset.yaml sets.
    os.environ["COORDINATOR_ADDRESS"],
    int(os.environ["NUM_PROCESSES"]),
    int(index),
  )


if __name__ == "__main__":
  join_job()
  train()
