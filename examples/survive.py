"""Trains as one of several processes, and goes on when others are killed.

  python examples/survive.py INDEX COUNT ADDRESS

Start COUNT processes, and kill one that is not the first: after some seconds
the others go on, from the same step and with their error memory. Nothing is
read from a disk. `live_devices` and `jax_enable_recoverability` are
experimental in JAX. The first process must live, because it coordinates.
"""

import os
import sys
import time

os.environ["XLA_FLAGS"] = (
  os.environ.get("XLA_FLAGS", "") + " --xla_cpu_collective_timeout_seconds=10"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import jaxmotion
from jaxmotion import checkpoint, codecs

STEPS = 40
TARGET = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


def loss_fn(params, batch):
  """Returns the mean squared error of a linear map."""
  return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def make_steps(mesh):
  """Returns the functions of training on a mesh."""
  codec = codecs.feedback(codecs.uniform(bits=4))
  tx = optax.chain(jaxmotion.exchange("data", codec), optax.adam(0.1))
  # A step that fails must not have freed the state before it.
  return jaxmotion.make_train_step(loss_fn, tx, mesh, donate=False)


def make_batch(mesh, i):
  """Returns a batch with rows of this process."""
  rng = np.random.default_rng([i, jax.process_index()])
  x = rng.normal(size=(16, 64)).astype(np.float32)
  rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
  return {
    name: jax.make_array_from_process_local_data(rows, own)
    for name, own in {"x": x, "y": x @ TARGET}.items()
  }


def go_on(state, old_mesh, mesh):
  """Returns the state and the step of those that live."""
  init, step = make_steps(mesh)
  params = {"w": np.zeros_like(TARGET)}
  if state is None:
    return init(params), step
  # Every process has the parameters whole.
  params = jax.tree.map(
    lambda a: np.asarray(a.addressable_data(0)), jaxmotion.read_params(state)
  )
  old_devices = list(old_mesh.devices.flat)
  opt_state = checkpoint.resize(
    init,
    state.opt_state,
    params,
    checkpoint.describe_state(make_steps(old_mesh)[0], params, old_mesh),
    mesh,
    lost=[
      i for i, d in enumerate(old_devices) if d not in set(mesh.devices.flat)
    ],
  )
  return init(params)._replace(opt_state=opt_state), step


def train():
  """Trains with all processes that live, and prints what happens."""
  state, mesh, step, i = None, None, None, 0
  while i < STEPS:
    try:
      with multihost_utils.live_devices(jax.devices()) as living:
        devices = sorted(living, key=lambda d: d.id)
        if mesh is None or devices != list(mesh.devices.flat):
          new_mesh = jax.sharding.Mesh(np.array(devices), ("data",))
          state, step = go_on(state, mesh, new_mesh)
          mesh = new_mesh
          print(f"step {i}: {len(devices)} workers", flush=True)
        new_state, loss = step(state, make_batch(mesh, i))
        loss = float(loss)
    except multihost_utils.ProcessFailureError as error:
      lost = [d.process_index for d in error.failed_devices]
      print(f"step {i}: lost processes {lost}", flush=True)
      continue
    state, i = new_state, i + 1
    print(f"step {i}: loss {loss:.4f}", flush=True)
    time.sleep(0.1)  # A real step takes longer.


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_enable_recoverability", True)
  jax.distributed.initialize(
    sys.argv[3],
    int(sys.argv[2]),
    int(sys.argv[1]),
    heartbeat_timeout_seconds=10,
  )
  train()
  # A process that ends waits for all others, also for the dead.
  os._exit(0)
