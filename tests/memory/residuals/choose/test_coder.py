"""Coders of residuals: traced once for each type of array."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmotion import codecs
from jaxmotion.memory import compress_residuals

TRACES = {"encode": [], "decode": []}


@dataclasses.dataclass(frozen=True)
class Counted(codecs.Codec):
  """Casts to bfloat16 and notes every trace."""

  def encode(self, x, state=(), key=None):
    TRACES["encode"].append(x.shape)
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), "uint16"), ()

  def decode(self, payload, like):
    TRACES["decode"].append(like.shape)
    floats = jax.lax.bitcast_convert_type(payload, jnp.bfloat16)
    return floats.astype(like.dtype)


def test_layers_of_one_shape_share_the_trace_of_a_codec():
  def loss(w, x):
    for _ in range(5):
      x = jnp.sin(x @ w)
    return jnp.sum(x)

  like = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  for traces in TRACES.values():
    traces.clear()
  for _ in range(2):
    jax.jit(jax.grad(compress_residuals(loss, Counted()))).trace(like, like)
  assert len(TRACES["encode"]) == 2  # Once to know the payload's types.
  assert len(TRACES["decode"]) == 1
