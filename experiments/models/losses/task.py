"""A training loss with the shapes of its parameters and of its batch."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, PyTree

_DROPPED = 0.1

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Function of a block that returns what runs in its place."""


class Task(NamedTuple):
  """A loss, and the shapes that it is called with."""

  # Function (params, batch) -> loss.
  loss_fn: Callable[[PyTree, PyTree], Array]
  params: PyTree  # Shapes of the parameters, which gradients are taken of.
  batch: PyTree  # Shapes of everything else.


def stack_shapes(
  layers: int, sizes: Mapping[str, tuple[int, ...]]
) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the float32 shapes of parameters stacked over layers."""
  return {
    name: jax.ShapeDtypeStruct((layers, *shape), jnp.float32)
    for name, shape in sizes.items()
  }


def make_scanned_loss(
  block: Callable[[PyTree, Array], Array],
) -> Callable[[PyTree, Array], Array]:
  """Returns the mean square of what blocks of stacked parameters return."""

  def loss_fn(params: PyTree, x: Array) -> Array:
    x, _ = lax.scan(lambda x, own: (block(own, x), None), x, params)
    return jnp.mean(x.astype(jnp.float32) ** 2)

  return loss_fn


def normalize_rms(x: Array, scale: Array) -> Array:
  """Divides channels by their root mean square, in float32."""
  x32 = x.astype(jnp.float32)
  size = lax.rsqrt((x32**2).mean(-1, keepdims=True) + 1e-6)
  return (x32 * size * scale).astype(x.dtype)


def normalize_layer(x: Array, scale: Array, bias: Array) -> Array:
  """Shifts and scales channels to mean 0 and variance 1, in float32."""
  x32 = x.astype(jnp.float32)
  mean = x32.mean(-1, keepdims=True)
  variance = ((x32 - mean) ** 2).mean(-1, keepdims=True)
  y = (x32 - mean) * lax.rsqrt(variance + 1e-5)
  return (y * scale + bias).astype(x.dtype)


def project(x: Array, kernel: Array) -> Array:
  """Multiplies by a kernel that is rounded to the dtype of `x`."""
  return x @ kernel.astype(x.dtype)


def drop_randomly(key: Array, x: Array) -> Array:
  """Replaces a tenth of the elements by zeros."""
  keep = jax.random.bernoulli(key, 1 - _DROPPED, x.shape)
  return jnp.where(keep, x / (1 - _DROPPED), 0).astype(x.dtype)


def run_plain(block: Callable[..., Any]) -> Callable[..., Any]:
  """Returns the block itself: the hook that wraps nothing."""
  return block
