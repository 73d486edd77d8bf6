"""One of several processes: index, count, address, schemes."""

import faulthandler
import functools
import hashlib
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, transforms
from tests.processes import WAIT

STEPS = 2
RNG = np.random.default_rng(0)
PARAMS = {
  "up": RNG.normal(size=(16, 32)).astype(np.float32) / 4,
  "down": RNG.normal(size=(32, 8)).astype(np.float32) / 4,
}
SPECS = {"up": P(None, "model"), "down": P("model")}
BATCH = {
  "x": RNG.normal(size=(8, 16)).astype(np.float32),
  "y": RNG.normal(size=(8, 8)).astype(np.float32),
  "mask": np.float32(np.arange(8) % 5 > 0),
}
BF16 = codecs.cast("bfloat16")
CODEC = codecs.feedback(BF16)


def loss_fn(params, batch):
  params = transforms.gather_params(params)
  y = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
  errors = jnp.mean((y - batch["y"]) ** 2, -1) * batch["mask"]
  return jnp.sum(errors) / jnp.sum(batch["mask"])


def loss_of_state(params, mean, batch):
  return loss_fn(params, batch), 0.9 * mean + 0.1 * batch["x"].mean(0)


def count_examples(batch):
  return jnp.sum(batch["mask"])


def feed(mesh):
  """The batch, of which every process makes the rows of its own devices."""
  rows = NamedSharding(mesh, P("data"))
  return jax.tree.map(
    lambda a: jax.make_array_from_callback(a.shape, rows, lambda i: a[i]), BATCH
  )


def make_own(mesh):
  """A step of one's own, in place of one that `make_train_step` makes."""

  @functools.partial(jax.jit, donate_argnames="state")
  def step(state, batch):
    params, opt_state = state
    loss, grads = jaxmotion.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = CHAIN.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
  return step, (params, CHAIN.init(params))


SGD = optax.sgd(0.1, 0.9)
CHAIN = optax.chain(jaxmotion.exchange("data", CODEC), SGD)
DELAYED = jaxmotion.delayed(CHAIN, is_weighted=True)
WEIGHTED = {"weight_fn": count_examples}
SCHEMES = {
  "averaged": (CHAIN, WEIGHTED | {"model_state": "mean"}),
  "sharded": (
    jaxmotion.sharded("data", SGD, gradient_codec=CODEC, weight_codec=BF16),
    {},
  ),
  "fully_sharded": (
    jaxmotion.fully_sharded(
      SGD, weight_codec=BF16, gradient_codec=BF16, error_feedback=True
    ),
    {},
  ),
  "delayed": (DELAYED, WEIGHTED),
  # Two hosts share a model, so that computations send too.
  "wide": (DELAYED, WEIGHTED | {"specs": SPECS}),
  # Products with powers of two are exact: one program and several compute the
  # same bits, whatever XLA joins to a product and a sum with one rounding.
  "flights": (
    jaxmotion.local_updates(
      optax.sgd(0.125, 0.5),
      optax.chain(jaxmotion.exchange("data", CODEC), optax.sgd(0.5, 0.5)),
      every=2,
      fragments=2,
      delay=1,
      mix=0.5,
    ),
    WEIGHTED,
  ),
}


def make(name, mesh):
  """Returns the step of a scheme, and its first state."""
  if name == "own":
    return make_own(mesh)
  scheme, options = SCHEMES[name]
  has_state = "model_state" in options
  loss = loss_of_state if has_state else loss_fn
  init, step = jaxmotion.make_train_step(loss, scheme, mesh, **options)
  return step, init(PARAMS, *[np.zeros(16, "f")] * has_state)


def run(names):
  """Losses and model state, and the last state, of each scheme by name."""
  auto = (AxisType.Auto,)
  mesh = jax.make_mesh((4,), ("data",), axis_types=auto)
  wide = jax.make_mesh((2, 2), ("data", "model"), axis_types=auto * 2)
  found = {}
  for name in names:
    used = wide if name == "wide" else mesh
    step, state = make(name, used)
    means = []
    for _ in range(STEPS):
      state, loss = step(state, feed(used))
      means.append(float(loss))
    if name == "averaged":  # Statistics are means too, summed in any order.
      means += np.asarray(state.model_state.addressable_data(0)).tolist()
      state = state._replace(model_state=None)
    found[name] = [means, describe_state(state)]
  return found


def describe_state(state):
  """Hashes of the parts of each leaf by their place, checked to be replicas."""
  found = {}
  for path, leaf in jax.tree.leaves_with_path(state):
    for shard in leaf.addressable_shards:
      name = f"{jax.tree_util.keystr(path)} {shard.index}"
      digest = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
      assert found.setdefault(name, digest) == digest, name
  return found


def join_job(index, processes, address, devices):
  """Joins a job of several processes; if that hangs, says where."""
  faulthandler.dump_traceback_later(WAIT - 40)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.config.update("jax_num_cpu_devices", devices)
  jax.distributed.initialize(address, processes, index)


def main(index, processes, address, *names):
  join_job(index, processes, address, 4 // processes)
  print(json.dumps(run(names)))


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
