"""Program of a test: trains on 8 emulated devices and waits only at the end.

Each step lasts longer than its dispatch, so the loop would get 32 steps ahead.
XLA ends the process if a collective then waits for half a minute.
"""

import os

os.environ["XLA_FLAGS"] = (
  "--xla_force_host_platform_device_count=8"
  " --xla_cpu_collective_call_warn_stuck_timeout_seconds=2"
  " --xla_cpu_collective_call_terminate_timeout_seconds=20"
)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmotion

STEPS, SIZE = 250, 128
MESH = jax.sharding.Mesh(jax.devices(), ("data",))
TX = optax.chain(jaxmotion.exchange("data"), optax.sgd(1e-3))
BATCH = jax.device_put(
  np.ones((8, 32, SIZE), np.float32),
  jax.sharding.NamedSharding(MESH, jax.P("data")),
)


def compute_loss(params, batch):
  for _ in range(4):
    batch = jnp.tanh(batch @ params)
  return jnp.mean(batch**2)


def run_even_steps():
  init, step = jaxmotion.make_train_step(compute_loss, TX, MESH)
  state = init(jnp.ones((SIZE, SIZE)))
  for _ in range(STEPS):
    state, loss = step(state, BATCH)
  return loss


def run_uneven_steps():
  init, step = jaxmotion.make_train_step(
    compute_loss, TX, MESH, weight_fn=len, microbatches=4
  )
  state = init(jnp.ones((SIZE, SIZE)))
  batch = jnp.concatenate([BATCH] * 4)
  for _ in range(STEPS):
    state, loss = step(state, batch, counts=[4] * 8)
  return loss


if __name__ == "__main__":
  jax.block_until_ready(run_even_steps())
  jax.block_until_ready(run_uneven_steps())
