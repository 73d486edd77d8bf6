"""Layers of long short-term memory, each a loop over positions."""

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import task
from jaxmotion.core import Array, PyTree


def make_lstm(
  wrap: task.Wrap = task.run_plain,
  *,
  layers: int = 4,
  width: int = 1024,
  batch: int = 64,
  length: int = 256,
) -> task.Task:
  """Returns layers of long short-term memory, in float32."""
  layer = wrap(_run_layer)

  def loss_fn(params: list[PyTree], x: Array) -> Array:
    for own in params:
      x = layer(own, x)
    return jnp.mean(x**2)

  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  own = {
    **{name: shape(width, 4 * width) for name in ("input", "state")},
    "bias": shape(4 * width),
  }
  return task.Task(loss_fn, [own] * layers, shape(length, batch, width))


def _run_layer(params: PyTree, x: Array) -> Array:
  """Returns the hidden states of all positions."""
  inputs = checkpoint_name(x @ params["input"] + params["bias"], "inputs")

  def run_cell(
    state: tuple[Array, Array], inputs: Array
  ) -> tuple[tuple[Array, Array], Array]:
    hidden, memory = state
    gates = checkpoint_name(inputs + hidden @ params["state"], "gates")
    enter, leave, out, new = jnp.split(gates, 4, -1)
    memory = nn.sigmoid(leave) * memory + nn.sigmoid(enter) * jnp.tanh(new)
    hidden = nn.sigmoid(out) * jnp.tanh(memory)
    return (hidden, memory), hidden

  start = jnp.zeros(x.shape[1:], x.dtype)
  return lax.scan(run_cell, (start, start), inputs)[1]
