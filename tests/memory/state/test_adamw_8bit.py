import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmotion import memory
from jaxmotion.core import tree_bytes as nbytes


def test_adamw_8bit_is_adamw_with_the_defaults_of_its_model():
  params = {"w": jnp.ones((64, 64)), "b": jnp.ones(4095)}
  state = jax.jit(memory.adamw_8bit().init)(params)
  encoded = [state.inner[0].mu["w"], state.inner[0].nu["w"]]
  assert [x.codec.block for x in encoded] == [256, 256]
  assert nbytes(state) == sum(map(nbytes, encoded)) + 2 * 4 * 4095 + 4 + 4
  exact = memory.adamw_8bit(min_leaf_size=64**2 + 1)
  same = optax.adamw(1e-3, weight_decay=1e-2)
  for tx in (exact, same):
    tree = jax.jit(tx.init)(params)
    updates, tree = jax.jit(tx.update)(params, tree, params)
    np.testing.assert_allclose(updates["w"][0, 0], -1e-3 * 1.01, rtol=1e-5)


def test_a_mask_is_made_of_bools():
  with pytest.raises(TypeError, match="`mask`"):
    memory.adamw_8bit(mask={"w": "yes"})
