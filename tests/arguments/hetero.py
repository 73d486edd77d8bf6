"""Calls of the training of workers with unequal speeds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmotion import hetero, transforms
from tests.arguments.calls import Call, Lazy

MESH = jax.sharding.Mesh(jax.devices()[:2], ("data",))
SPEEDS, COUNTS = (1.0, 2.0), (2, 1)
BALANCE = hetero.rebalance(total=6, workers=2)
BATCH = np.zeros((2, 2, 1, 3), np.float32)
SECONDS = np.ones(2, np.float32)
PARAMS = np.zeros(3, np.float32)


def loss_fn(params, x):
  return jnp.sum((x - params[None]) ** 2), x.size


@functools.cache
def uneven():
  tx = optax.chain(transforms.exchange("data"), optax.sgd(0.5))
  return hetero.uneven_data_parallel(loss_fn, tx, MESH)


@functools.cache
def state_like():
  return jax.eval_shape(uneven().init, jnp.zeros(3))


@functools.cache
def work_like():
  return jax.eval_shape(
    lambda s, b: uneven().work(s, b, COUNTS), state_like(), jnp.asarray(BATCH)
  )


def zeros(like):
  return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), like)


STATE, WORK = (
  Lazy(lambda: zeros(state_like())),
  Lazy(lambda: zeros(work_like())),
)

CALLS = {
  "hetero.assign_microbatches": Call(
    np.arange(6.0), COUNTS, microbatch=2, max_microbatches=4
  ),
  "hetero.rebalance": Call(total=6, workers=2, caps=(4, 4)),
  "hetero.rebalance.init": Call(SPEEDS, on=BALANCE.init),
  "hetero.rebalance.update": Call(
    (0.1, 0.2), BALANCE.init(), on=BALANCE.update
  ),
  "hetero.rebalance.speeds": Call(BALANCE.init(), on=BALANCE.speeds),
  "hetero.fit_speed": Call((1, 2), (0.1, 0.2)),
  "hetero.ideal_shares": Call(6, SPEEDS, caps=(4, 4)),
  "hetero.integer_shares": Call(6, SPEEDS, caps=(4, 4)),
  "hetero.makespan_s": Call(COUNTS, SPEEDS),
  "hetero.uneven_data_parallel": Call(
    loss_fn, transforms.exchange("data"), MESH
  ),
  "hetero.uneven_data_parallel -> init": Call(
    PARAMS, on=Lazy(lambda: uneven().init), traced=True
  ),
  "hetero.uneven_data_parallel -> work": Call(
    STATE, BATCH, COUNTS, on=Lazy(lambda: uneven().work), traced=True
  ),
  "hetero.uneven_data_parallel -> update": Call(
    STATE, WORK, SECONDS, on=Lazy(lambda: uneven().update), traced=True
  ),
  "hetero.uneven_data_parallel -> step": Call(
    STATE, BATCH, COUNTS, on=Lazy(lambda: uneven().step), traced=True
  ),
}
UNCALLED = {}
ACCEPTED = {
  ("*", "fixed_s"): {"zero": "nothing else takes time", "huge": "any time"},
  ("hetero.rebalance.update", "state"): {"reshaped": "plain numbers stay"},
  ("hetero.rebalance.speeds", "state"): {"reshaped": "plain numbers stay"},
  ("*", "total"): {"zero": "no work, no shares"},
  ("hetero.rebalance", "min_microbatches"): {"zero": "a worker may rest"},
}
KNOWN_BAD = set()
