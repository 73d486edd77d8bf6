"""Llama in bfloat16: rotated positions, grouped queries, gated perceptrons."""

import functools

import jax
import jax.numpy as jnp
from jax import nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import attention, task
from jaxmotion.core import Array, PyTree


def make_llama(
  wrap: task.Wrap = task.run_plain,
  *,
  layers: int = 16,
  width: int = 1024,
  heads: int = 16,
  groups: int = 4,
  batch: int = 8,
  length: int = 1024,
) -> task.Task:
  """Returns the blocks of a Llama, in a loop."""
  # Each group of queries shares the keys and values of one head.
  size = width // heads
  block = wrap(functools.partial(_run_block, heads=heads, groups=groups))
  sizes = {
    **{"q": (width, width), "out": (width, width)},
    **{"k": (width, groups * size), "v": (width, groups * size)},
    **{"gate": (width, 3 * width), "up": (width, 3 * width)},
    **{"down": (3 * width, width), "scale1": (width,), "scale2": (width,)},
  }
  params = task.stack_shapes(layers, sizes)
  x = jax.ShapeDtypeStruct((batch, length, width), jnp.bfloat16)
  return task.Task(task.make_scanned_loss(block), params, x)


def _run_block(params: PyTree, x: Array, *, heads: int, groups: int) -> Array:
  """Adds attention, then a gated perceptron."""
  h = task.normalize_rms(x, params["scale1"])

  def project(name: str, count: int) -> Array:
    y = checkpoint_name(task.project(h, params[name]), name)
    return y.reshape(*x.shape[:2], count, -1)

  q, k = _rotate(project("q", heads)), _rotate(project("k", groups))
  k, v = (y.repeat(heads // groups, 2) for y in (k, project("v", groups)))
  y = attention.attend_all(q, k, v, lambda weights: weights)
  y = checkpoint_name(y.reshape(x.shape), "attention")
  x = x + checkpoint_name(task.project(y, params["out"]), "out")
  h = task.normalize_rms(x, params["scale2"])
  gate = checkpoint_name(task.project(h, params["gate"]), "gate")
  up = checkpoint_name(task.project(h, params["up"]), "up")
  return x + task.project(nn.silu(gate) * up, params["down"])


def _rotate(x: Array) -> Array:
  """Rotates pairs of channels by angles that grow with the position."""
  length, half = x.shape[1], x.shape[-1] // 2
  rates = 10_000.0 ** (-jnp.arange(half) / half)
  angles = (jnp.arange(length)[:, None] * rates)[:, None]
  a, b = jnp.split(x.astype(jnp.float32), 2, -1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  y = jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)
  return y.astype(x.dtype)
