"""Calls of the counters of bytes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import codecs
from jaxmotion.wire import Ledger, Move
from tests.arguments.calls import Call, Lazy

MOVE = Move("all_reduce", ("data",), 8, "float32", 1000, 1)
X = np.ones((8, 8), np.float32)


@functools.cache
def compiled():
  return jax.jit(lambda x: 2 * x).lower(1.0).compile()


def total(*trees):
  """Takes whatever has arrays: what it is given is checked before."""
  leaves = jax.tree.leaves(trees)
  return sum(jnp.sum(jnp.asarray(a, jnp.float32)) for a in leaves)


INSTANCES = {"Ledger": Ledger((MOVE,))}
CALLS = {
  "wire.Move": Call(*MOVE),
  "wire.Ledger": Call((MOVE,)),
  "wire.Ledger.select": Call(op="all_reduce", dtype="float32", axes=("data",)),
  "wire.payload_bytes": Call(codecs.sign(), X),
  "wire.step_bytes": Call(total, X, branch=0, while_trips=1),
  "wire.compiled_bytes": Call(Lazy(compiled), branch=0, while_trips=1),
}
_ANY = {"zero": "nothing happens", "huge": "bytes are plain integers"}
ACCEPTED = {
  ("*", "workers"): _ANY,
  ("*", "payload_bytes"): _ANY,
  ("*", "count"): _ANY,
  ("*", "while_trips"): _ANY,
  ("*", "dtype"): {"misspelt": "moves may name no dtype, such as 'words'"},
  ("*", "branch"): {"huge": "no conditional of the program sends anything"},
  ("wire.Ledger", "moves"): {"empty": "nothing is sent"},
}
