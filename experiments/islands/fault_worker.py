"""One process of an island that `faults.py` starts, and may kill.

It logs each round that it sees, with the checksum and the error of the anchor,
and its number of steps. It ends in the round that the file `finish` has.
"""

import argparse
import json
import math
import pathlib
import time
import zlib

import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

from experiments.islands.worker import hash_arrays, open_bucket
from jaxmotion import codecs, islands

_PARAMS = {
  "w": np.zeros((20, 10), np.float32),
  "b": np.zeros(8, np.float32),
}
_RATE, _NOISE = 0.05, 0.3


def _start_job(address: str, processes: int, rank: int) -> None:
  """Makes this process one of a JAX job."""
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(address, processes, rank)


def _train(island: islands.Island, arguments: argparse.Namespace) -> None:
  """Trains towards ones, with noisy gradients, until the end."""
  folder, rank = arguments.folder, arguments.rank
  log = folder / f"{island.name}.{rank}"
  name = zlib.crc32(island.name.encode())
  rng = np.random.default_rng([arguments.seed, name])
  # Rows over all processes of a job.
  mesh = jax.sharding.Mesh(jax.devices(), ("data",))
  rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
  inner = jax.jit(
    lambda p, noise: jax.tree.map(
      lambda p, n: p - _RATE * (p - 1.0 + n), p, noise
    ),
    donate_argnums=0,
  )
  params = jax.device_put(island.start(), rows)
  steps, last, final = 0, -1, math.inf
  while last < final:
    time.sleep(arguments.step_s)
    noise = jax.tree.map(
      lambda p: rng.normal(0, _NOISE, p.shape).astype(np.float32), _PARAMS
    )
    params = island.step(inner(params, noise))
    steps += 1
    log.with_suffix(f".{rank}.steps").write_text(str(steps))
    if island.round > last:
      last, anchor = island.round, jax.device_get(island.anchor)
      error = float(np.abs(anchor["w"] - 1).mean())
      line = {"round": last, "anchor": hash_arrays(anchor), "error": error}
      with log.open("a") as file:
        file.write(json.dumps(line) + "\n")
      finish = folder / "finish"
      own = float(finish.read_text()) if finish.exists() else math.inf
      # All processes of a job take as many steps.
      final = multihost_utils.broadcast_one_to_all(np.float32(own))


def main() -> None:
  """Trains as one island, or as one process of it."""
  parser = argparse.ArgumentParser()
  parser.add_argument("--folder", type=pathlib.Path)
  parser.add_argument("--server", help="of S3; by default, a folder")
  parser.add_argument("--name")
  parser.add_argument("--grace_s", type=float)
  parser.add_argument("--seed", type=int)
  parser.add_argument("--step_s", type=float)
  parser.add_argument("--coordinator")
  parser.add_argument("--processes", type=int)
  parser.add_argument("--rank", type=int)
  arguments = parser.parse_args()
  if arguments.processes > 1:
    _start_job(arguments.coordinator, arguments.processes, arguments.rank)
  store = (
    open_bucket(arguments.server, timeout="1s")
    if arguments.server
    else arguments.folder / "run"
  )
  island = islands.join(
    store,
    _PARAMS,
    optax.sgd(0.7, momentum=0.9, nesterov=True),
    codec=codecs.feedback(codecs.uniform(bits=4)),
    every=4,
    name=arguments.name,
    grace_s=arguments.grace_s,
  )
  _train(island, arguments)
  island.stop()


if __name__ == "__main__":
  main()
