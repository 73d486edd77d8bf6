from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmotion.memory import _memory_kind


def test_a_missing_memory_kind_warns_once_by_name(monkeypatch):
  memories = [SimpleNamespace(kind=kind) for kind in ("device", "tape")]
  device = SimpleNamespace(
    platform="abacus", addressable_memories=lambda: memories
  )
  monkeypatch.setattr(jax, "local_devices", lambda: [device])
  can_move = _memory_kind.can_move
  with pytest.warns(UserWarning) as seen:
    assert not can_move("pinned_host")
  (warning,) = seen
  assert "'pinned_host'" in str(warning.message)
  assert "abacus backend" in str(warning.message)
  assert "device, tape" in str(warning.message)
  assert not can_move("pinned_host", warn=False)
  assert not can_move(None)
  memories[1].kind = "pinned_host"
  assert can_move("pinned_host")


@pytest.mark.parametrize("run", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_arrays_move_and_return_bit_for_bit(run):
  tree = {"a": jnp.arange(5.0), "b": jnp.arange(3, dtype=jnp.uint8)}
  on_host = run(_memory_kind.to_host)(tree)
  back = run(_memory_kind.to_device)(on_host)
  kinds = {a.sharding.memory_kind for a in jax.tree.leaves(on_host)}
  assert kinds == {"pinned_host"}
  assert {a.sharding.memory_kind for a in jax.tree.leaves(back)} == {"device"}
  jax.tree.map(np.testing.assert_array_equal, tree, back)
