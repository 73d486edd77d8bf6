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
  names = [r.name for r in saved]
  assert "mask/eq_0" in names and "dense/2" not in names
  found = jax.jit(jax.grad(compress_residuals(loss, memory_budget=0.0)))(
    w, x, z
  )
  assert distance(jax.jit(jax.grad(loss))(w, x, z), found) < 1e-6


def test_a_budget_in_bytes_traces_the_function_once():
  traces = []

  def loss(w, x):
    traces.append(0)
    for _ in range(3):
      x = jnp.sin(x @ w) * x
    return jnp.sum(x)

  w, x = normal(0, 64, 64), normal(1, 128, 64)
  whole = residuals_of(loss, w, x, memory_budget=1.0)
  most = sum(r.nbytes for r in whole) // 2
  traces.clear()
  found = residuals_of(loss, w, x, memory_budget=most)
  assert len(traces) == 1
  assert 0 < sum(r.encoded_bytes for r in found) <= most
