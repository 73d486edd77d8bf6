"""States of sharded optimizers and parameters continue on other workers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jaxmotion
from jaxmotion import checkpoint, codecs, core, transforms
from jaxmotion.memory import compress_state
from jaxmotion.transforms import gather_params
from tests.checkpoint.helpers import (
  ONE,
  abstract_mesh,
  assert_equal,
  fill_randomly,
)
from tests.meshes import mesh_of

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
  tx, mesh = make_tx(), mesh_of(2)
  layout = checkpoint.describe_state(tx, SMALL, mesh_of(4))
  state = fill_randomly(checkpoint.saved_like(tx, SMALL, layout, mesh_of(1)))
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
  theirs = checkpoint.describe_state(bare, SMALL, mesh_of(4))
  none = dataclasses.replace(state.master, value=(), dimensions=())
  made_for = dataclasses.replace(state.made_for, weight_codec=None)
  with pytest.raises(ValueError, match="`state` must be of `layout`, made for"):
    checkpoint.resize(tx, state, SMALL, theirs, mesh)
  held = state._replace(master=none, made_for=made_for)
  with pytest.raises(ValueError, match="0 of them, got 2. Give `weight_codec="):
    checkpoint.resize(tx, held, SMALL, theirs, mesh)


def test_what_is_no_array_of_a_parameters_shape_is_refused_on_others():
  tx = make_tx(inner=compress_state(optax.adam(0.1), min_leaf_size=64))
  four = abstract_mesh(4)
  layout = checkpoint.describe_state(tx, SMALL, four)
  like = checkpoint.saved_like(tx, SMALL, layout, mesh_of(1))
  state = fill_randomly(like)
  with pytest.raises(
    ValueError, match="`tx` must keep .* `inner/.*compress_st"
  ):
    checkpoint.resize(tx, state, SMALL, layout, mesh_of(2))
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
    four, mesh = abstract_mesh(4), mesh_of(workers)
    layout = checkpoint.describe_state(tx, params, four)
    state = checkpoint.saved_like(tx, params, layout, mesh_of(1))
    state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), state)
    _, step = jaxmotion.make_train_step(
      lambda p, x: jnp.sum(p["p"] * jnp.mean(x)), tx, mesh, donate=False
    )
    with pytest.raises(ValueError, match=message):
      held = jax.tree.map(jnp.asarray, params)
      state = transforms.TrainState(held, None, state)
      step.lower(state, jnp.ones(6))


# No number of workers here divides both, and two cut `q` alone.
PARAMS = {
  "p": np.zeros((25, 26), np.float32),
  "q": np.zeros((37, 5), np.float32),
  "b": np.zeros(3, np.float32),
}
CODED = dict(gradient_codec=codecs.uniform(bits=4), error_feedback=True)


def linear_loss(params, batch):
  """The gradient of an example is itself."""
  whole = gather_params(params)
  return sum(jnp.sum(whole[k] * jnp.mean(batch[k], 0)) for k in whole)


def make(workers, tx, **options):
  return jaxmotion.make_train_step(
    linear_loss, jaxmotion.fully_sharded(tx, **options), mesh_of(workers)
  )


def describe(init, workers):
  return checkpoint.describe_state(init, PARAMS, abstract_mesh(workers))


def trim(state, name):
  """Moments by path, without padding."""
  found = optax.tree.get(state, name)
  return jax.tree.map(lambda a, p: a[tuple(map(slice, p.shape))], found, PARAMS)


def test_moments_keep_their_bits_and_fresh_padding_is_zero():
  init, _ = make(4, optax.adam(0.1), **CODED)
  layout = describe(init, 4)
  like = checkpoint.saved_like(init, PARAMS, layout, mesh_of(1))
  state = fill_randomly(like)
  again = checkpoint.resize(init, state, PARAMS, layout, mesh_of(4))
  assert_equal(again, state)
  expected, before = state, 4
  for workers in (3, 2, 4):
    new = abstract_mesh(workers)
    layout = describe(init, before)
    reset = before < workers  # Four hold `q` whole, and two remember it.
    if reset:
      with pytest.raises(
        ValueError, match=r"got 4, which hold .* \(37, 5\) wh"
      ):
        checkpoint.resize(init, state, PARAMS, layout, new)
    state = checkpoint.resize(
      init, state, PARAMS, layout, new, reset_memory=reset
    )
    for name in ("mu", "nu"):
      a, b = (trim(s, name) for s in (state, expected))
      assert_equal(a, b)
    cut, p = state.made_for.cuts[1], optax.tree.get(state, "mu")["p"]
    assert cut.workers == workers and p.shape == cut.shard_shape(workers)
    before = workers
  assert not np.any(p[:, 26:])  # Two workers had no padding.
  assert not any(map(np.any, jax.tree.leaves(state.error)))


def test_padded_parameters_are_not_those_of_a_layout():
  init, _ = make(4, optax.adam(0.1))
  state = init(PARAMS)
  layout = describe(init, 4)
  with pytest.raises(
    ValueError, match="parameters that `jaxmotion.read_params`"
  ):
    checkpoint.resize(init, state.opt_state, state.params, layout, mesh_of(2))


def test_an_axis_of_another_name_keeps_its_parts():
  found = []
  for workers, name in ((4, "old"), (2, "new")):
    mesh = mesh_of(workers, names=(name,))
    init, _ = jaxmotion.make_train_step(
      linear_loss,
      jaxmotion.fully_sharded(optax.adam(0.1), **CODED),
      mesh,
      axis_name=name,
    )
    found.append((init, mesh, name))
  (old, mesh, name), (new, two, today) = found
  layout = checkpoint.describe_state(old, PARAMS, mesh, axis_name=name)
  state = fill_randomly(old(PARAMS).opt_state)
  moved = checkpoint.resize(new, state, PARAMS, layout, two, axis_name=today)
  assert moved.inner.axes == moved.made_for.axis_name == ("new",)
  for one in ("mu", "nu"):
    a, b = (trim(s, one) for s in (moved, state))
    assert_equal(a, b)


def test_hosts_of_one_device_continue_as_workers_do():
  axes = jaxmotion.HostAxes("host", "device")
  plain, _ = make(4, optax.sgd(0.1, 0.9), **CODED)
  hosts, _ = jaxmotion.make_train_step(
    linear_loss,
    jaxmotion.fully_sharded(optax.sgd(0.1, 0.9), **CODED),
    mesh_of(4, 1, names=axes.names),
    axis_name=axes,
  )
  found = []
  for init, names, shapes in (
    (plain, "data", ((4,), (2,))),
    (hosts, axes, ((4, 1), (2, 1))),
  ):
    four, two = (AbstractMesh(n, core.axis_names(names)) for n in shapes)
    state = fill_randomly(init(PARAMS).opt_state)
    layout = checkpoint.describe_state(init, PARAMS, four, axis_name=names)
    found.append(
      checkpoint.resize(init, state, PARAMS, layout, two, axis_name=names)
    )
  assert_equal(*map(jax.tree.leaves, found))
