import jax
import jax.numpy as jnp

from jaxmotion.memory import compress_residuals, residuals_of
from tests.memory.residuals.nets import distance, normal


def test_what_a_saved_mask_follows_from_is_not_recomputed():
  def loss(w, x, z):
    same = z[0][None, :] == z[:, 0][:, None]
    return jnp.sum(jnp.sin(x @ w) * same.astype(x.dtype))

  w, x, z = normal(0, 8, 64), normal(1, 64, 8), jnp.round(normal(2, 64, 64))
  saved = residuals_of(loss, w, x, z, memory_budget=0.0)
  assert [r.name for r in saved] == ["dense/1", "mask/eq_0"]
  found = jax.jit(jax.grad(compress_residuals(loss, memory_budget=0.0)))(
    w, x, z
  )
  assert distance(jax.jit(jax.grad(loss))(w, x, z), found) < 1e-6
