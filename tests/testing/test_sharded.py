import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jaxmotion.testing import check_sharded

MESH = Mesh(np.array(jax.devices()[:2]), ("data",))
PARAMS = {"w": np.ones((16, 16), np.float32), "b": np.ones(3, np.float32)}


def test_an_optimizer_of_single_elements_passes_on_several_workers():
  check_sharded(optax.adamw(1e-2), MESH, PARAMS)
  with pytest.raises(ValueError, match="`mesh` must have at least 2 workers"):
    check_sharded(optax.sgd(0.1), Mesh(jax.devices()[:1], ("data",)), PARAMS)


def test_noise_that_is_drawn_for_a_leaf_is_found():
  tx = optax.add_noise(1.0, 0.5, key=jax.random.key(0))
  with pytest.raises(AssertionError, match="`w`: the update of step 0"):
    check_sharded(tx, MESH, PARAMS, steps=1)
