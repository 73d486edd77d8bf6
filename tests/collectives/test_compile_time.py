"""Programs that a compiler must not take minutes for."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxmotion
from jaxmotion import codecs, transforms
from tests.collectives.helpers import bind
from tests.meshes import mesh_of


def test_hashes_of_keys_are_compiled_outside_of_loops():
  # LLVM took minutes for a loop that held the hashes of its rows' keys.
  codec = codecs.chain(
    codecs.rotate(block=32),
    codecs.uniform(bits=4, block=128, rounding="stochastic"),
  )
  grads = jax.random.normal(jax.random.key(0), (4 * 64, 64))
  tx = jaxmotion.exchange("data", codec)
  state = transforms.bind_mesh(tx, mesh_of(4)).init(jnp.zeros((64, 64)))
  specs = jaxmotion.state_specs(state, "data")
  update = bind(tx.update, 4, (P("data"), specs), (P(), specs))
  mean = np.asarray(grads).reshape(4, 64, 64).mean(0)
  error = np.linalg.norm(update(grads, state)[0] - mean)
  assert error < 0.3 * np.linalg.norm(mean)
