"""States of fully sharded parameters that continue on other workers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

import jaxmotion
from jaxmotion import checkpoint, codecs, core
from jaxmotion.transforms import gather_params
from tests.checkpoint.helpers import assert_equal, fill_randomly, make_mesh

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
    linear_loss, jaxmotion.fully_sharded(tx, **options), make_mesh(workers)
  )


def describe(init, workers):
  return checkpoint.describe_state(
    init, PARAMS, AbstractMesh((workers,), ("data",))
  )


def trim(state, name):
  """Moments by path, without padding."""
  found = optax.tree.get(state, name)
  return jax.tree.map(lambda a, p: a[tuple(map(slice, p.shape))], found, PARAMS)


def test_moments_keep_their_bits_and_fresh_padding_is_zero():
  init, _ = make(4, optax.adam(0.1), **CODED)
  layout = describe(init, 4)
  like = checkpoint.saved_like(init, PARAMS, layout, make_mesh(1))
  state = fill_randomly(like)
  again = checkpoint.resize(init, state, PARAMS, layout, make_mesh(4))
  assert_equal(again, state)
  expected, before = state, 4
  for workers in (3, 2, 4):
    new = AbstractMesh((workers,), ("data",))
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
    checkpoint.resize(init, state.opt_state, state.params, layout, make_mesh(2))


def test_an_axis_of_another_name_keeps_its_parts():
  found = []
  devices = np.array(jax.devices())
  for workers, name in ((4, "old"), (2, "new")):
    mesh = Mesh(devices[:workers], (name,))
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
  devices = np.array(jax.devices())
  plain, _ = make(4, optax.sgd(0.1, 0.9), **CODED)
  hosts, _ = jaxmotion.make_train_step(
    linear_loss,
    jaxmotion.fully_sharded(optax.sgd(0.1, 0.9), **CODED),
    Mesh(devices[:4].reshape(4, 1), axes.names),
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
