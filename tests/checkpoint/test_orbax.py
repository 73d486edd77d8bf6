"""States that orbax's standard handlers save and restore, in real files."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractMesh

import jaxmotion
from jaxmotion import checkpoint, codecs
from jaxmotion.transforms import gather_params
from tests.checkpoint.helpers import (
  assert_equal,
  draw_gradients,
  fill_randomly,
)
from tests.meshes import mesh_of

PARAMS = {"w": np.zeros((12, 48), np.float32), "b": np.zeros(5, np.float32)}
MEMORY = codecs.feedback(codecs.sign())
ADAM = optax.adam(0.1)
CHAINS = {
  "exchange": optax.chain(jaxmotion.exchange("data", MEMORY), ADAM),
  "sharded": jaxmotion.sharded(
    "data", ADAM, gradient_codec=MEMORY, weight_codec=codecs.sign()
  ),
}


def loss_fn(params, batch):
  params = gather_params(params)
  return sum(jnp.sum(params[k] * jnp.mean(batch[k], 0)) for k in PARAMS)


@functools.cache
def make(kind, workers):
  """(init, step, what has the state) of one trainer."""
  mesh = mesh_of(workers)
  if kind != "fully_sharded":
    return *jaxmotion.make_train_step(loss_fn, CHAINS[kind], mesh), CHAINS[kind]
  init, step = jaxmotion.make_train_step(
    loss_fn,
    jaxmotion.fully_sharded(
      ADAM, gradient_codec=codecs.sign(), error_feedback=True
    ),
    mesh,
  )
  return init, step, init


def batch_at(step):
  return draw_gradients(PARAMS, 12, np.random.default_rng(step))


@functools.cache
def trained(kind):
  """The states of 4 workers after two steps, and after three."""
  init, step, _ = make(kind, 4)
  two = init(PARAMS)
  for i in range(2):
    two, _ = step(two, batch_at(i))
  kept = jax.tree.map(jnp.copy, two)
  three, _ = step(two, batch_at(2))
  return kept, three


def save(path, tree):
  with ocp.StandardCheckpointer() as saver:
    saver.save(path, tree)


def restore(path, like):
  with ocp.StandardCheckpointer() as saver:
    return saver.restore(path, like)


def abstract(tree):
  return jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree
  )


@pytest.mark.parametrize("kind", ["sharded", "fully_sharded"])
def test_as_many_workers_continue_bit_for_bit(kind, tmp_path):
  two, three = trained(kind)
  save(tmp_path / "state", two)
  # A new process has parameters and a state of its own making.
  init, step, _ = make(kind, 4)
  restored = restore(tmp_path / "state", abstract(init(PARAMS)))
  assert_equal(restored, two)
  for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(two), strict=True):
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
  after, _ = step(restored, batch_at(2))
  assert_equal(after, three)


@pytest.mark.parametrize("kind", ["exchange", "fully_sharded"])
def test_fewer_workers_continue_from_files(kind, tmp_path):
  (params, _, state), _ = trained(kind)
  _, _, tx = make(kind, 4)
  layout = checkpoint.describe_state(tx, PARAMS, mesh_of(4))
  save(tmp_path / "state", state)
  save(tmp_path / "params", params)
  text = json.dumps(layout.to_dict())

  init, step, tx = make(kind, 3)
  mesh = mesh_of(3)
  start = init(PARAMS)
  layout = checkpoint.Layout.from_dict(json.loads(text))
  like = checkpoint.saved_like(tx, PARAMS, layout, mesh)
  saved = restore(tmp_path / "state", like)
  resized = checkpoint.resize(tx, saved, PARAMS, layout, mesh)
  for a, b in zip(
    jax.tree.leaves(resized), jax.tree.leaves(start.opt_state), strict=True
  ):
    assert a.shape == b.shape
    assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
  for name in PARAMS:
    before, after = (optax.tree.get(s, "mu")[name] for s in (state, resized))
    np.testing.assert_array_equal(after, before)
  held = restore(tmp_path / "params", abstract(start.params))
  assert_equal(held, params)
  step(start._replace(params=held, opt_state=resized), batch_at(2))


@pytest.mark.parametrize("kind", [*CHAINS, "fully_sharded"])
def test_a_state_of_other_workers_says_how_it_differs(kind):
  state = trained(kind)[0].opt_state
  init, step, tx = make(kind, 3)
  host = init(PARAMS)._replace(opt_state=jax.device_get(state))
  with pytest.raises(
    ValueError,
    match=r"`opt_state` must be of the 3 workers .* shape \(4,.*"
    r"continue a state of other workers by `jaxmotion.checkpoint.resize`",
  ):
    step(host, batch_at(2))
  layout = checkpoint.describe_state(tx, PARAMS, mesh_of(3))
  with pytest.raises(ValueError, match="`state` must be of `layout`"):
    checkpoint.resize(tx, state, PARAMS, layout, mesh_of(3))
  with pytest.raises((TypeError, ValueError), match="`layout` must|`state` mu"):
    other = CHAINS["sharded" if kind == "exchange" else "exchange"]
    four = checkpoint.describe_state(tx, PARAMS, mesh_of(4))
    checkpoint.resize(other, state, PARAMS, four, mesh_of(4))


def test_devices_that_remember_parts_keep_their_hosts():
  axes = jaxmotion.HostAxes("host", "device")
  init, _ = jaxmotion.make_train_step(
    loss_fn,
    jaxmotion.fully_sharded(ADAM, error_feedback=True),
    mesh_of(2, 2, names=axes.names),
    axis_name=axes,
  )
  two, four = (AbstractMesh((hosts, 2), axes.names) for hosts in (2, 4))
  layout = checkpoint.describe_state(init, PARAMS, two, axis_name=axes)
  one = mesh_of(1, 1, names=axes.names)
  like = checkpoint.saved_like(init, PARAMS, layout, one, axis_name=axes)
  state = fill_randomly(like)
  args = init, state, PARAMS, layout
  assert_equal(checkpoint.resize(*args, two, axis_name=axes), state)
  with pytest.raises(ValueError, match="`mesh` must have the hosts and dev"):
    checkpoint.resize(*args, four, axis_name=axes)
  fresh = checkpoint.resize(*args, four, axis_name=axes, reset_memory=True)
  (error,) = fresh.error.value
  assert error.shape == (8, 12, 24) and not np.any(error)
  assert_equal(*(s.inner.value[0].mu["b"] for s in (fresh, state)))
