"""One of two processes: index, count, address, schemes.

It prints what `worker` does, and for each case of other arguments in each
process what `init` said.
"""

import json
import sys

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh

from jaxmotion import codecs, transforms
from tests.transforms import worker

INT4 = codecs.feedback(codecs.uniform(bits=4))


def exchange(codec=INT4, rate=0.1, schedule=None):
  return optax.chain(
    transforms.exchange("data", codec),
    optax.sgd(rate if schedule is None else schedule),
  )


def own_chain(codec):
  """A chain inside of functions that are not those of optax."""
  tx = exchange(codec)
  return optax.GradientTransformationExtraArgs(
    lambda params: tx.init(params), lambda *args, **given: tx.update(*args)
  )


# Name -> (scheme, parameters) of a process, by its index.
CASES = {
  "same": lambda i: (exchange(), {}),
  "values": lambda i: (exchange(), {"up": worker.PARAMS["up"] * (1 + i)}),
  "shape": lambda i: (exchange(), {"up": np.ones((16, 32 - 8 * i), "f")}),
  "leaf": lambda i: (exchange(), {"extra": np.ones(3, "f")} if i else {}),
  "rate": lambda i: (exchange(rate=0.1 + 0.1 * i), {}),
  "schedule": lambda i: (
    exchange(schedule=optax.cosine_decay_schedule(0.1, 100 + i)),
    {},
  ),
  "codec": lambda i: (
    exchange(codecs.feedback(codecs.uniform(bits=4 + 4 * i))),
    {},
  ),
  "own_chain": lambda i: (
    own_chain(codecs.feedback(codecs.uniform(bits=4 + 4 * i))),
    {},
  ),
  "every": lambda i: (
    transforms.local_updates(optax.sgd(0.1), exchange(), every=2 + i),
    {},
  ),
  # Functions of others may hold what each process has for itself.
  "closure": lambda i: (exchange(schedule=lambda count: 0.1 + 0 * i), {}),
  "weights": lambda i: (
    transforms.fully_sharded(
      optax.adam(1e-3), weight_codec=codecs.uniform(bits=8, block=256 << i)
    ),
    {},
  ),
}


def try_case(index, name, mesh):
  scheme, changes = CASES[name](index)
  init, _ = transforms.make_train_step(worker.loss_fn, scheme, mesh)
  try:
    init(worker.PARAMS | changes)
  except ValueError as error:
    return str(error)
  return "started"


def try_model_state(index, mesh):
  """Statistics that all share are equal; those of each worker need not be."""
  said = {}
  for kept in ("mean", "local"):
    init, _ = transforms.make_train_step(
      worker.loss_of_state, exchange(), mesh, model_state=kept
    )
    try:
      init(worker.PARAMS, np.full(16, float(index), "f"))
      said[kept] = "started"
    except ValueError as error:
      said[kept] = str(error)
  return said


def main(index, processes, address, *names):
  worker.join_job(index, processes, address, 2)
  steps = worker.run(names)
  auto = (AxisType.Auto,)
  mesh = jax.make_mesh((4,), ("data",), axis_types=auto)
  own = Mesh(np.array(jax.local_devices()), ("data",), axis_types=auto)
  found = {name: try_case(index, name, mesh) for name in CASES}
  found |= try_model_state(index, mesh)
  # Processes that train apart need not agree: only one of them is asked here.
  found["apart"] = "started" if index else try_case(0, "rate", own)
  print(json.dumps([steps, found]))


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
