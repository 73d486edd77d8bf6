"""Kernels that operations are fused into."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmotion.perfmodel import predict_cost


def test_a_name_moves_nothing_and_ends_no_kernel():
  def layer(name):
    return lambda x: jnp.sum(name(jnp.tanh(name(x @ x)) * 2))

  x = jax.ShapeDtypeStruct((64, 64), "float32")
  plain = predict_cost(layer(lambda x: x), x)
  named = predict_cost(layer(lambda x: checkpoint_name(x, "value")), x)
  assert named.kernels == plain.kernels
  assert named.totals == plain.totals
