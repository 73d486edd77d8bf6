from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion import memory
from jaxmotion.memory import _memory_kind


def device_with(*kinds):
  """Returns what JAX says of a device that has these memories."""
  memories = [SimpleNamespace(kind=kind) for kind in kinds]
  return SimpleNamespace(
    platform="abacus", addressable_memories=lambda: memories
  )


def test_memory_kinds_are_those_that_the_device_names():
  device = jax.local_devices()[0]
  assert memory.memory_kinds() == memory.memory_kinds(device)
  assert "device" in memory.memory_kinds()
  assert device.default_memory().kind in memory.memory_kinds()


def test_an_available_memory_kind_is_returned():
  device = device_with("device", "pinned_host")
  assert memory.resolve_memory_kind("pinned_host", device) == "pinned_host"
  assert memory.resolve_memory_kind(None, device_with()) is None


def test_a_missing_memory_kind_warns_once_by_name():
  with pytest.warns(UserWarning) as seen:
    assert (
      memory.resolve_memory_kind("pinned_host", device_with("device", "tape"))
      is None
    )
  (warning,) = seen
  assert "'pinned_host'" in str(warning.message)
  assert "abacus backend" in str(warning.message)
  assert "device, tape" in str(warning.message)
  assert (
    memory.resolve_memory_kind("pinned_host", device_with(), warn=False) is None
  )


def test_an_unknown_memory_kind_is_refused():
  with pytest.raises(
    ValueError, match="`memory_kind` must be one of None, 'pinn"
  ):
    memory.resolve_memory_kind("disk")


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_arrays_move_and_return_bit_for_bit(run):
  tree = {"a": jnp.arange(5.0), "b": jnp.arange(3, dtype=jnp.uint8)}
  on_host = run(_memory_kind.to_host)(tree)
  back = run(_memory_kind.to_device)(on_host)
  kinds = {a.sharding.memory_kind for a in jax.tree.leaves(on_host)}
  assert kinds == {"pinned_host"}
  assert {a.sharding.memory_kind for a in jax.tree.leaves(back)} == {"device"}
  jax.tree.map(np.testing.assert_array_equal, tree, back)
