"""States that continue with the workers that live."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmotion
from jaxmotion import checkpoint, core, transforms
from jaxmotion.collectives import extend as collective
from tests.checkpoint.helpers import (
  abstract_mesh,
  assert_equal,
  describe,
  fill_randomly,
)
from tests.checkpoint.test_resize import PARAMS, make_tx
from tests.meshes import mesh_of


def read_rows(state, layout):
  """Returns what each worker remembers, with a leading axis of workers."""
  (options,) = layout.exchanges
  return collective.read_memory(
    state[0].codec_state.value, PARAMS, options.state_layout(layout.sizes)
  )


@pytest.mark.parametrize("lost", [[2], [0, 3]])
@pytest.mark.parametrize("is_placed", [False, True])
def test_the_living_keep_their_memory(lost, is_placed):
  tx = make_tx(method="gather")
  layout, like = describe(tx, PARAMS, 4)
  state = fill_randomly(like)
  living = [i for i in range(4) if i not in lost]
  mesh = (mesh_of if is_placed else abstract_mesh)(len(living))
  found = checkpoint.resize(tx, state, PARAMS, layout, mesh, lost=lost)
  before, after = (
    read_rows(one, describe(tx, PARAMS, workers)[0])
    for one, workers in ((state, 4), (found, len(living)))
  )
  # An error is a difference, which compiled programs may round otherwise.
  close = functools.partial(np.testing.assert_allclose, atol=4e-6)
  jax.tree.map(lambda a, b: close(a[np.array(living)], b), before, after)
  assert_equal(state[1], found[1])


def test_what_the_lost_kept_for_others_counts_as_zero():
  # In two phases each worker keeps errors of its part of the mean.
  tx = make_tx()
  layout, like = describe(tx, PARAMS, 3)
  state = fill_randomly(like)
  forget = lambda a: np.concatenate([a[:1], 0 * a[1:2], a[2:]])
  memory = jax.tree.map(forget, state[0].codec_state)
  dead = state[0]._replace(codec_state=memory), *state[1:]
  two = abstract_mesh(2)
  assert_equal(
    *(
      checkpoint.resize(tx, one, PARAMS, layout, two, lost=[1])
      for one in (state, dead)
    )
  )


def test_the_living_are_mixed_for_more_or_fewer_workers():
  tx = make_tx(method="gather")
  layout, like = describe(tx, PARAMS, 4)
  state = fill_randomly(like)
  kept = checkpoint.resize(
    tx, state, PARAMS, layout, abstract_mesh(2), lost=[0, 1]
  )
  for count in (1, 4):
    mesh = abstract_mesh(count)
    at_once = checkpoint.resize(tx, state, PARAMS, layout, mesh, lost=[0, 1])
    after = checkpoint.resize(
      tx, kept, PARAMS, describe(tx, PARAMS, 2)[0], mesh
    )
    assert_equal(at_once, after)


def test_workers_that_cannot_be_lost_are_refused():
  tx = make_tx(method="gather")
  layout, like = describe(tx, PARAMS, 2)
  state, one = fill_randomly(like), abstract_mesh(1)
  for lost in ([2], [0, 1]):
    with pytest.raises(ValueError, match="`lost` must have some of the 2"):
      checkpoint.resize(tx, state, PARAMS, layout, one, lost=lost)
  tx = jaxmotion.sharded("data", optax.adam(1e-3))
  layout, like = describe(tx, PARAMS, 2)
  with pytest.raises(ValueError, match="`lost` must be empty for a state"):
    checkpoint.resize(tx, fill_randomly(like), PARAMS, layout, one, lost=[0])


def test_the_living_keep_their_own_parameters():
  tx = optax.chain(jaxmotion.exchange("data", method="gather"), optax.sgd(1.0))
  scheme = jaxmotion.local_updates(optax.sgd(0.1), tx, every=4)
  loss_fn = lambda params, batch: jnp.sum(params["w"] * batch.mean())

  def start(workers):
    return jaxmotion.make_train_step(loss_fn, scheme, mesh_of(workers))

  params = {"w": np.zeros((3, 4), np.float32)}
  init, step = start(3)
  state, _ = step(init(params), np.arange(3, dtype=np.float32))
  layout = checkpoint.describe_state(init, params, mesh_of(3))
  found = checkpoint.resize(
    start(2)[0], state.opt_state, params, layout, mesh_of(2), lost=[1]
  )
  before, after = (
    np.asarray(jax.tree.leaves(own.params)[0])
    for tree in (state.opt_state, found)
    for own in core.find_nodes(tree, transforms.LocalState)
  )
  np.testing.assert_array_equal(before[np.array([0, 2])], after)
  assert len(np.unique(before)) == 3
