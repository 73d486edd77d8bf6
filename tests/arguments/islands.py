"""Calls of islands, which meet in a store in memory."""

import numpy as np
import obstore.store
import optax

from jaxmotion import codecs, islands
from tests.arguments.calls import Call, Lazy

PARAMS = {"w": np.zeros(4, np.float32)}


def join_memory():
  island = islands.join(
    obstore.store.MemoryStore(),
    PARAMS,
    optax.sgd(1.0),
    codec=codecs.identity(),
    every=1 << 20,
  )
  island.start()
  return island


GIVEN = {
  "store": Lazy(obstore.store.MemoryStore),
  "params": PARAMS,
  "outer": optax.sgd(1.0),
  "codec": codecs.uniform(bits=8),
  "every": 2,
  "name": "a",
  "max_norm": 10.0,
}
CALLS = {
  "islands.Island.step": Call(on=Lazy(lambda: join_memory().step)),
}
UNCALLED = {
  "islands.Island": "`join` makes it",
}
ACCEPTED = {
  ("islands.join", "store"): {"misspelt": "any text is a folder"},
  ("islands.join", "name"): {"misspelt": "any word is a name"},
  ("islands.join", "max_norm"): {"huge": "any limit"},
}
