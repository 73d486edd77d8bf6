"""Optimisers whose state is encoded train as they do without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import jaxmotion
from jaxmotion import codecs, memory
from jaxmotion.memory import Packed, _place, pack_state, unpack_state
from jaxmotion.testing import check_transform
from tests.compilations import compilations

RNG = np.random.default_rng(0)
PARAMS = {
  "bias": jnp.zeros(70),
  "kernel": jnp.asarray(RNG.normal(size=(64, 70)), jnp.float32),
}
PLACES = pytest.mark.parametrize("place", [None, "pinned_host"])
EXACT = dict(first=codecs.identity(), second=codecs.identity(), small=0)


def multi_steps(tx):
  return optax.MultiSteps(tx, 2).gradient_transformation()


def packing(**options):
  return functools.partial(pack_state, **options)


def wrapped(pack):
  """Optimisers with `pack_state` inside, outside and in the middle."""
  return {
    "clip_masked": optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.masked(pack(optax.adamw(1e-2)), {"bias": False, "kernel": True}),
    ),
    "inject": pack(
      optax.inject_hyperparams(optax.sgd)(
        learning_rate=0.1, momentum=0.9, nesterov=True
      )
    ),
    "multi_steps": multi_steps(pack(optax.lion(1e-2))),
    "of_multi_steps": pack(
      multi_steps(
        optax.partition(
          {"x": optax.adam(1e-2), "y": optax.sgd(1e-2)},
          {"bias": "y", "kernel": "x"},
        )
      )
    ),
    "if_finite": optax.apply_if_finite(
      pack(optax.chain(holds_a_key(), optax.rmsprop(1e-2))), 3
    ),
  }


def holds_a_key():
  """Has a state that is no number."""

  def update(updates, state, params=None):
    return updates, state

  return optax.GradientTransformation(lambda _: jax.random.key(3), update)


def train(tx, params=PARAMS, steps=4):
  """Trains on a small quadratic; returns parameters and state."""

  @jax.jit
  def step(params, state):
    grads = jax.tree.map(lambda p: p - 0.3, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  for _ in range(steps):
    params, state = step(params, state)
  return params, state


def bits(tree):
  def of(a):
    is_key = jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(a) if is_key else a).tobytes()

  return [of(a) for a in jax.tree.leaves(tree)]


def types(tree):
  return jax.tree.map(jax.typeof, tree)


def kinds(state):
  """The memories of (what is encoded, all else)."""
  leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Packed))
  found = [set(), set()]
  for x in leaves:
    for a in jax.tree.leaves(x):
      found[not isinstance(x, Packed)].add(a.sharding.memory_kind)
  return tuple(found)


@functools.cache
def without(name):
  return train(wrapped(lambda tx: tx)[name])


@PLACES
@pytest.mark.parametrize("name", wrapped(packing()))
def test_an_identity_changes_nothing_in_any_chain(name, place):
  params, state = train(wrapped(packing(**EXACT, place=place))[name])
  expected, plain = without(name)
  assert kinds(state) == ({place or "device"}, {"device"})
  assert bits(params) == bits(expected)
  assert bits(bare(state)) == bits(plain)


def bare(state):
  """The state as it is without `pack_state`."""
  one = lambda x: isinstance(x, memory.PackState)
  return jax.tree.map(
    lambda x: x.inner if one(x) else x, unpack_state(state), is_leaf=one
  )
