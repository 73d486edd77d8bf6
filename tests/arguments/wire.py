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


CALLS = {
  "wire.Move": Call(*MOVE),
  "wire.Ledger": Call((MOVE,)),
  "wire.Ledger.select": Call(
    op="all_reduce", dtype="float32", axes=("data",), on=Ledger((MOVE,)).select
  ),
  "wire.Ledger.per_axis": Call(on=Ledger((MOVE,)).per_axis),
  "wire.payload_bytes": Call(codecs.sign(), X),
  "wire.step_bytes": Call(jnp.sin, X, branch=0, while_trips=1),
  "wire.compiled_bytes": Call(Lazy(compiled), branch=0, while_trips=1),
}
UNCALLED = {}
ACCEPTED = {}
KNOWN_BAD = {
  ("wire.Move", "op"),
  ("wire.Move", "axes"),
  ("wire.Move", "workers"),
  ("wire.Move", "dtype"),
  ("wire.Move", "payload_bytes"),
  ("wire.Move", "count"),
  ("wire.Ledger", "moves"),
  ("wire.Ledger.select", "op"),
  ("wire.Ledger.select", "dtype"),
  ("wire.Ledger.select", "axes"),
  ("wire.payload_bytes", "codec"),
  ("wire.payload_bytes", "like"),
  ("wire.step_bytes", "fn"),
  ("wire.step_bytes", "args"),
  ("wire.step_bytes", "branch"),
  ("wire.step_bytes", "while_trips"),
  ("wire.compiled_bytes", "compiled"),
  ("wire.compiled_bytes", "branch"),
  ("wire.compiled_bytes", "while_trips"),
}
