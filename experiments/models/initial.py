"""Initial parameters that few compiled programs draw, whatever their shapes."""

import math
from collections.abc import Callable
from functools import partial

import jax
import numpy as np

from jaxmotion.core import Array

Draw = Callable[..., Array]

_SHARED = 4096  # Elements of the draw that all smaller arrays begin.
_WITHIN_TWO = np.float32(0.87962566103423978)  # Deviation within -2 and 2.


def draw_kernel(scale: float = 1.0) -> Draw:
  """Returns an initializer of kernels, whose last axis is that of outputs."""
  # It draws what `nnx.initializers.variance_scaling(scale, "fan_in",
  # "truncated_normal")` draws: the random bits of an element depend on the key
  # and on its index in the flat array alone. XLA compiles a flat draw up to
  # four times as fast as one of several axes.

  def draw(key: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    inputs = math.prod(shape[:-1])
    deviation = np.sqrt(np.float32(scale / inputs)) / _WITHIN_TWO
    count = max(math.prod(shape), _SHARED)
    noise = jax.random.truncated_normal(key, -2, 2, (count,), dtype)
    return _take(noise, deviation, shape)

  return draw


def draw_table(deviation: float) -> Draw:
  """Returns an initializer of tables: `nnx.initializers.normal(deviation)`."""

  def draw(key: Array, shape: tuple[int, ...], dtype: np.dtype) -> Array:
    count = max(math.prod(shape), _SHARED)
    noise = jax.random.normal(key, (count,), dtype)
    return _take(noise, np.float32(deviation), shape)

  return draw


@partial(jax.jit, static_argnums=2)
def _take(noise: Array, deviation: Array, shape: tuple[int, ...]) -> Array:
  """Returns an array of the first elements, times a deviation."""
  return noise[: math.prod(shape)].reshape(shape) * deviation
