"""One island in a process of its own, which tests kill.

  python -m tests.islands.worker STORE NAME LOG FINISH

It appends a line to the log for each round that it sees, and ends in the round
that the file FINISH has, once there is one.
"""

import pathlib
import sys
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import codecs, islands
from jaxmotion.islands import _message

CODEC = codecs.feedback(codecs.uniform(bits=4))
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
PARAMS = {"w": jnp.zeros((20, 10)), "b": jnp.zeros(7)}


def train(store, name, log, finish):
  """Trains towards ones, with noisy gradients, until the end."""
  rng = np.random.default_rng(zlib.crc32(name.encode()))
  island = islands.join(
    store, PARAMS, OUTER, codec=CODEC, every=4, name=name, grace_s=1.0
  )
  inner = jax.jit(
    lambda p, noise: jax.tree.map(
      lambda p, n: p - 0.05 * (p - 1.0 + n), p, noise
    ),
    donate_argnums=0,
  )
  params, last = island.start(), -1
  while not finish.exists() or island.round < int(finish.read_text()):
    time.sleep(0.005)
    noise = jax.tree.map(
      lambda p: rng.normal(0, 0.3, p.shape).astype(np.float32), PARAMS
    )
    params = island.step(inner(params, noise))
    if island.round > last:
      last, anchor = island.round, jax.device_get(island.anchor)
      error = np.abs(anchor["w"] - 1).mean()
      with log.open("a") as file:
        digest = _message.checksum_arrays(anchor)
        file.write(f"{last} {digest} {error:.5f}\n")
  island.stop()


if __name__ == "__main__":
  train(sys.argv[1], sys.argv[2], *map(pathlib.Path, sys.argv[3:]))
