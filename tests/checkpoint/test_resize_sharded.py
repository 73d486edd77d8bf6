"""States of sharded optimizers and models that continue on other workers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import (
  AbstractMesh,
)

import jaxmotion
from jaxmotion import checkpoint, codecs, transforms
from jaxmotion.memory import compress_state
from tests.checkpoint.helpers import (
  ONE,
  assert_equal,
  fill_randomly,
  make_mesh,
)

MEMORY = codecs.feedback(codecs.sign())
INT4 = codecs.uniform(bits=4)


def make_tx(gradient_codec=MEMORY, inner=None, **options):
  options = {"weight_codec": INT4} | options
  return jaxmotion.sharded(
    options.pop("axis_name", "data"),
    optax.adam(0.1) if inner is None else inner,
    gradient_codec=gradient_codec,
    **options,
  )


def read_whole(tx, state, layout):
  """(errors, masters, first moments) of the state of one worker."""
  one = checkpoint.resize(tx, state, SMALL, layout, ONE)
  cut, whole = one.codec_state.value
  values = [m.memory.value[0, 0] for m in cut]
  values += [reduced.first.memory.value[0] for reduced in whole]
  return values, one.master.value, optax.tree.get(one, "mu")


SMALL = {"w": np.zeros((24, 24), np.float32), "b": np.zeros(5, np.float32)}


def test_another_codec_continues_the_memory_or_says_what_is_lost():
  tx, mesh = make_tx(), make_mesh(2)
  layout = checkpoint.describe_state(tx, SMALL, make_mesh(4))
  state = fill_randomly(checkpoint.saved_like(tx, SMALL, layout, make_mesh(1)))
  other = make_tx(codecs.feedback(INT4), weight_codec=codecs.identity())
  moved = checkpoint.resize(other, state, SMALL, layout, mesh)
  today = checkpoint.describe_state(other, SMALL, mesh)
  found = read_whole(other, moved, today)
  for a, b in zip(found, read_whole(tx, state, layout), strict=True):
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), a, b
    )
  with pytest.raises(ValueError, match="`tx` must have error memory for 'b'"):
    checkpoint.resize(make_tx(INT4), state, SMALL, layout, mesh)
  fresh = checkpoint.resize(
    make_tx(INT4), state, SMALL, layout, mesh, reset_memory=True
  )
  assert not jax.tree.leaves(fresh.codec_state)
  with pytest.raises(ValueError, match="`master` arrays .* 2 of them, got 0"):
    bare = make_tx(weight_codec=None)
    checkpoint.resize(bare, state, SMALL, layout, mesh)
  theirs = checkpoint.describe_state(bare, SMALL, make_mesh(4))
  none = dataclasses.replace(state.master, value=(), dimensions=())
  made_for = dataclasses.replace(state.made_for, weight_codec=None)
  with pytest.raises(ValueError, match="`state` must be of `layout`, made for"):
    checkpoint.resize(tx, state, SMALL, theirs, mesh)
  held = state._replace(master=none, made_for=made_for)
  with pytest.raises(ValueError, match="0 of them, got 2. Give `weight_codec="):
    checkpoint.resize(tx, held, SMALL, theirs, mesh)


def test_what_is_no_array_of_a_parameters_shape_is_refused_on_others():
  tx = make_tx(inner=compress_state(optax.adam(0.1), min_leaf_size=64))
  four = AbstractMesh((4,), ("data",))
  layout = checkpoint.describe_state(tx, SMALL, four)
  like = checkpoint.saved_like(tx, SMALL, layout, make_mesh(1))
  state = fill_randomly(like)
  with pytest.raises(
    ValueError, match="`tx` must keep .* `inner/.*compress_st"
  ):
    checkpoint.resize(tx, state, SMALL, layout, make_mesh(2))
  again = checkpoint.resize(tx, state, SMALL, layout, four)
  assert_equal(again, state)


def test_a_step_names_moments_that_other_workers_cut():
  """Neither a master nor error memory says how many workers there were."""
  tx = jaxmotion.sharded("data", optax.adam(0.1))
  params = {"p": np.zeros((25, 26), np.float32)}
  for workers, message in (
    (3, "`opt_state` must be of the 3 workers .*checkpoint.resize"),
    (2, "`state/inner` must be like .*checkpoint.resize"),
  ):
    four, mesh = AbstractMesh((4,), ("data",)), make_mesh(workers)
    layout = checkpoint.describe_state(tx, params, four)
    state = checkpoint.saved_like(tx, params, layout, make_mesh(1))
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state)
    _, step = jaxmotion.make_train_step(
      lambda p, x: jnp.sum(p["p"] * jnp.mean(x)), tx, mesh, donate=False
    )
    with pytest.raises(ValueError, match=message):
      held = jax.tree.map(jnp.asarray, params)
      state = transforms.TrainState(held, None, state)
      step.lower(state, jnp.ones(6))
