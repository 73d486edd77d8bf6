"""Diagonal state-space model whose recurrence is an associative scan."""

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import task
from jaxmotion.core import Array, PyTree


def make_state_space(
  wrap: task.Wrap = task.run_plain,
  *,
  layers: int = 12,
  width: int = 1024,
  batch: int = 8,
  length: int = 1024,
) -> task.Task:
  """Returns gated linear recurrences, in bfloat16 but for the recurrence."""
  # Each block projects to twice the channels, lets a state decay by a gate that
  # depends on the input, and multiplies the states with a second branch.
  block = wrap(_run_block)
  sizes = {
    **{"scale": (width,), "decay": (2 * width,)},
    **{name: (width, 2 * width) for name in ("input", "rate", "gate")},
    "out": (2 * width, width),
  }
  params = task.stack_shapes(layers, sizes)
  x = jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16)
  return task.Task(task.make_scanned_loss(block), params, x)


def _run_block(params: PyTree, x: Array) -> Array:
  """Adds a gated linear recurrence over the positions."""
  h = task.normalize_rms(x, params["scale"])
  project = lambda name: task.project(h, params[name])
  u = checkpoint_name(project("input"), "input")
  rate = nn.softplus(checkpoint_name(project("rate"), "rate").astype("float32"))
  decay = jnp.exp(-rate * jnp.exp(params["decay"]))
  states = _scan_states(decay, rate * u.astype(jnp.float32))
  states = checkpoint_name(states.astype(x.dtype), "states")
  gate = nn.silu(checkpoint_name(project("gate"), "gate"))
  y = task.project(states * gate, params["out"])
  return x + checkpoint_name(y, "out")


def _scan_states(decay: Array, inputs: Array) -> Array:
  """Returns all states of `state = decay * state + input`."""

  def combine(
    left: tuple[Array, Array], right: tuple[Array, Array]
  ) -> tuple[Array, Array]:
    return left[0] * right[0], left[1] * right[0] + right[1]

  return lax.associative_scan(combine, (decay, inputs), axis=1)[1]
