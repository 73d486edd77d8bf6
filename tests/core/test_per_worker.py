import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec as P

import jaxmotion
from jaxmotion import codecs
from jaxmotion.core import (
  PerWorker,
  Split,
  pack_worker,
  state_specs,
  unpack_worker,
)

MESH = Mesh(np.array(jax.devices()[:4]), ("data",))
TREE = {"e": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(3), "empty": ()}


def test_unpacking_inverts_packing():
  packed = pack_worker(TREE)
  assert isinstance(packed, PerWorker)
  assert packed.value["e"].shape == (1, 2, 3)
  assert packed.value["n"].shape == (1,)
  back = unpack_worker(packed)
  assert jax.tree.structure(back) == jax.tree.structure(TREE)
  for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(TREE), strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("shape", [(), (4, 3), (0,)])
def test_the_view_of_all_workers_is_an_error(shape):
  with pytest.raises(ValueError, match="`state` must be one worker's view"):
    unpack_worker(PerWorker({"e": jnp.zeros(shape)}))


def test_each_worker_sees_its_own_row():
  state = {"count": jnp.int32(5), "e": PerWorker(jnp.arange(8.0).reshape(4, 2))}
  specs = state_specs(state, "data")

  def double(state):
    own = unpack_worker(state["e"])
    assert own.shape == (2,)
    return {"count": state["count"] + 1, "e": pack_worker(2 * own)}

  new = jax.jit(
    jax.shard_map(double, mesh=MESH, in_specs=(specs,), out_specs=specs)
  )(state)
  np.testing.assert_array_equal(new["e"].value, 2 * state["e"].value)
  assert int(new["count"]) == 6


@pytest.mark.parametrize("axis", ["data", ("host", "device")])
def test_specs_split_only_what_differs_between_workers(axis):
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    jaxmotion.exchange("data", codecs.feedback(codecs.uniform(bits=4))),
    optax.adam(1e-3),
  )
  params = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
  init, _ = jaxmotion.make_train_step(lambda p, b: p["w"].sum(), tx, MESH)
  state = init(params)
  specs = state_specs(state.opt_state, axis)
  assert jax.tree.structure(specs) == jax.tree.structure(state.opt_state)
  own = {id(a) for a in jax.tree.leaves(state.opt_state[1].codec_state)}
  assert len(own) == 8  # Of both arrays: count, value, words and scale.
  for leaf, spec in zip(
    jax.tree.leaves(state.opt_state), jax.tree.leaves(specs), strict=True
  ):
    assert spec == (P(axis) if id(leaf) in own else P())


def test_shapes_have_the_specs_of_their_arrays():
  state = {"e": PerWorker(jnp.zeros((4, 2))), "count": jnp.int32(0)}
  shapes = jax.eval_shape(lambda: state)
  assert state_specs(shapes, "data") == state_specs(state, "data")


def test_arrays_that_are_split_keep_the_shape_of_the_whole():
  split = Split({"a": jnp.ones((3, 8)), "b": jnp.ones(5)}, (1, None), ("data",))
  specs = state_specs({"m": split, "n": jnp.int32(0)}, "data")
  assert specs["m"].value == {"a": P(None, ("data",)), "b": P()}

  def double(state):
    assert state["m"].value["a"].shape == (3, 2)
    return jax.tree.map(lambda a: 2 * a, state)

  new = jax.jit(
    jax.shard_map(double, mesh=MESH, in_specs=(specs,), out_specs=specs)
  )({"m": split, "n": jnp.int32(0)})
  assert new["m"].value["a"].shape == (3, 8)
  assert new["m"].dimensions == split.dimensions
