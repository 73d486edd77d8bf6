"""One of the processes of an island: index, count, address, folder."""

import json
import sys

import jax
import numpy as np
import optax

from jaxmotion import codecs, islands

STEPS, NAN_STEP, LARGE_STEP = 14, 5, 9
# -0 stays -0 where nothing changes.
PARAMS = {"w": np.zeros((4, 3), np.float32), "b": -np.zeros(2, np.float32)}


def train(folder, place):
  """Returns rounds, and bytes of parameters and anchors, of each step."""
  island = islands.join(
    folder,
    PARAMS,
    optax.sgd(0.7, momentum=0.9),
    codec=codecs.feedback(codecs.uniform(bits=4)),
    every=2,
    name="a",
    max_norm=1e3,
  )
  params, seen = place(island.start()), []
  for i in range(STEPS):
    change = {NAN_STEP: np.nan, LARGE_STEP: 1e6}.get(i, 0.1 * i)
    w = params["w"] + np.float32(change) * np.arange(12.0).reshape(4, 3)
    params = island.step({**params, "w": w})
    whole = [
      np.concatenate([np.asarray(s.data) for s in leaf.addressable_shards])
      for leaf in jax.tree.leaves((params, island.anchor))
    ]
    seen.append([island.round, [leaf.tobytes().hex() for leaf in whole]])
  island.stop()
  return seen


def main(index, count, address, folder):
  """Trains with parameters whose rows are divided over all processes."""
  if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, index)
  mesh = jax.sharding.Mesh(jax.devices(), ("data",))
  rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
  print(json.dumps(train(folder, lambda tree: jax.device_put(tree, rows))))


if __name__ == "__main__":
  main(*map(int, sys.argv[1:3]), *sys.argv[3:])
