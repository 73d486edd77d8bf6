"""One or a few small blocks, of which a compiler fuses nearly everything."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import nn
from jax.ad_checkpoint import checkpoint_name

from experiments.models.losses import task
from jaxmotion.core import Array, PyTree


def make_blocks(
  wrap: task.Wrap = task.run_plain,
  *,
  kind: str,
  blocks: int = 1,
  width: int = 1024,
  rows: int = 8192,
) -> task.Task:
  """Returns blocks in float32, one after the other, without a loop."""
  sizes, run = KINDS[kind]
  block = wrap(run)

  def loss_fn(params: list[PyTree], x: Array) -> Array:
    for own in params:
      x = block(own, x)
    return jnp.mean(x**2)

  shapes = {
    name: jax.ShapeDtypeStruct([n * width for n in size], jnp.float32)
    for name, size in sizes.items()
  }
  x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
  return task.Task(loss_fn, [shapes] * blocks, x)


def _run_perceptron(
  params: PyTree, x: Array, activation: Callable[[Array], Array]
) -> Array:
  h = checkpoint_name(x @ params["up"], "up")
  return x + activation(h) @ params["down"]


def _run_gated(params: PyTree, x: Array) -> Array:
  a = checkpoint_name(x @ params["gate"], "gate")
  b = checkpoint_name(x @ params["up"], "up")
  return x + (nn.silu(a) * b) @ params["down"]


def _run_normalized(params: PyTree, x: Array) -> Array:
  mean = x.mean(-1, keepdims=True)
  variance = ((x - mean) ** 2).mean(-1, keepdims=True)
  y = (x - mean) / jnp.sqrt(variance + 1e-5) * params["scale"]
  return jnp.tanh(checkpoint_name(y @ params["kernel"], "dense"))


_Sizes = dict[str, tuple[int, ...]]

_PERCEPTRON: _Sizes = {"up": (1, 4), "down": (4, 1)}

KINDS: dict[str, tuple[_Sizes, Callable[..., Array]]] = {
  "gelu": (_PERCEPTRON, functools.partial(_run_perceptron, activation=nn.gelu)),
  "relu": (_PERCEPTRON, functools.partial(_run_perceptron, activation=nn.relu)),
  "swiglu": ({"gate": (1, 4), **_PERCEPTRON}, _run_gated),
  "norm": ({"scale": (1,), "kernel": (1, 1)}, _run_normalized),
}
"""Sizes of the parameters in widths and the function, by kind of block."""
