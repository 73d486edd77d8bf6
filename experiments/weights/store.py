"""Host-resident stores of the cases, and the weights that a device sees."""

import functools

import jax
import numpy as np
import optax

from experiments.weights import cases
from experiments.weights.model import Model, Tree
from jaxmotion import codecs, memory

# Biases and norms travel as they are, as in the paper; the other weights of a
# stage share one precision.
GROUPS = ((r"bias|scale", None), (r"(.*?)/", r"\1"))


def make_store(
  case: cases.Case, tx: optax.GradientTransformation, model: Model
) -> memory.HostResident:
  """Returns the host-resident store of a case."""
  return memory.HostResident(
    model.stages,
    tx,
    weights=case.weights,
    grads=case.grads,
    send_difference=case.delta,
    groups=GROUPS,
    min_leaf_size=0,
    stateful=True,
  )


def make_signal(
  case: cases.Case,
  store: memory.HostResident,
  state: memory.HostState,
  level: np.ndarray | int,
) -> jax.Array:
  """Returns the input of a case's controller: norms or relative errors."""
  if case.control == "budget":
    return store.errors(state, level)
  return store.norms(state)


def received_weights(
  case: cases.Case,
  store: memory.HostResident,
  state: memory.HostState,
  level: np.ndarray,
) -> Tree:
  """Returns the weights that the device computes with."""
  # They are those of the next step. A case that sends differences has them on
  # the device already.
  groups = store.groups_of(state.params)
  parts = groups.split(state.params)
  if case.delta:
    # A group is a stage, and both are in the order of their names.
    reference = iter(jax.tree.leaves(state.device_reference))
    received = [[next(reference) for _ in part] for part in parts]
  else:
    received = [
      [_round_trip(case.weights[own], x) for x in part]
      for own, part in zip(level, parts, strict=True)
    ]
  return groups.merge(received, state.params)


@functools.partial(jax.jit, static_argnums=0)
def _round_trip(codec: codecs.Codec, x: jax.Array) -> jax.Array:
  return codec.decode(codec.encode(x)[0], x)
