import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from jaxmotion.core import (
  PerWorker,
  Shared,
  Split,
  axis_names,
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
  assert jax.tree.map(jax.typeof, back) == jax.tree.map(jax.typeof, TREE)
  jax.tree.map(np.testing.assert_array_equal, back, TREE)


@pytest.mark.parametrize("shape", [(), (4, 3), (0,)])
def test_the_view_of_all_workers_is_an_error(shape):
  with pytest.raises(ValueError, match="`state` must be one worker's view"):
    unpack_worker(PerWorker({"e": jnp.zeros(shape)}))


def test_each_worker_sees_its_own_row_and_its_part():
  split = Split({"a": jnp.ones((3, 8)), "b": jnp.ones(5)}, (1, None), ("data",))
  own = PerWorker(jnp.arange(8.0).reshape(4, 2))
  state = {"count": jnp.int32(5), "e": own, "m": split}
  specs = state_specs(state, "data")
  assert specs["m"].value == {"a": P(None, ("data",)), "b": P()}

  def double(state):
    own = unpack_worker(state["e"])
    assert own.shape == (2,) and state["m"].value["a"].shape == (3, 2)
    new = jax.tree.map(lambda a: 2 * a, state)
    return new | {"e": pack_worker(2 * own)}

  new = jax.jit(
    jax.shard_map(double, mesh=MESH, in_specs=(specs,), out_specs=specs)
  )(state)
  assert jax.tree.structure(new) == jax.tree.structure(state)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2 * b), new, state)


@pytest.mark.parametrize("axis", ["data", ("host", "device")])
def test_specs_split_only_what_differs_between_workers(axis):
  shared = Shared(jnp.zeros((1, 2)), axis_names(axis))
  memory = {"e": jnp.zeros((4, 2)), "shared": shared}
  state = {"count": jnp.int32(0), "codec": PerWorker(memory)}
  specs = state_specs(state, axis)
  assert specs["count"] == specs["codec"].value["shared"].value == P()
  assert specs["codec"].value["e"] == P(axis)
  assert state_specs(jax.eval_shape(lambda: state), axis) == specs
