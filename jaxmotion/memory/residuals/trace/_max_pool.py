"""Max pooling whose backward pass reads only the argmax of each window.

The argmax is the position inside the window, packed in 1 to 8 bits; JAX's own
gradient of max pooling saves the whole operand.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import program
from jaxmotion.core import Array
from jaxmotion.memory.residuals.trace import _bits

Padding = tuple[tuple[int, int], ...]
# One comparison per window position: for larger windows, finding the argmax
# takes too many passes over the operand.
_LARGEST_WINDOW = 64


def is_max_pool(step: program.Step) -> bool:
  """Says whether a step is max pooling that `max_pool` can evaluate."""
  if step.name != "reduce_window_max":
    return False
  params = step.eqn.params
  dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
  floats = jnp.issubdtype(step.outs[0].aval.dtype, jnp.floating)
  size = math.prod(params["window_dimensions"])
  return floats and not dilated and 1 < size <= _LARGEST_WINDOW


def evaluate_max_pool(step: program.Step, x: Array) -> Array:
  """Evaluates a max-pooling step by `max_pool`."""
  params = step.eqn.params
  return max_pool(
    x,
    tuple(params["window_dimensions"]),
    tuple(params["window_strides"]),
    tuple(tuple(p) for p in params["padding"]),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def max_pool(
  x: Array, window: tuple[int, ...], strides: tuple[int, ...], padding: Padding
) -> Array:
  """Computes max pooling with a gradient that does not read `x`."""
  # The gradient of a window goes to the element that that of
  # `lax.reduce_window` goes to: the first of the largest ones. No comparison
  # holds for NaN, so a NaN takes the place of what comes before it, and what
  # comes next takes its own.
  return _reduce_max(x, window, strides, padding)


def _reduce_max(
  x: Array, window: tuple[int, ...], strides: tuple[int, ...], padding: Padding
) -> Array:
  return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def _forward(
  x: Array, window: tuple[int, ...], strides: tuple[int, ...], padding: Padding
) -> tuple[Array, tuple[Array, Array]]:
  """Returns the maxima, and as residuals the packed argmax of each window."""
  # The argmax comes from the comparisons of a running maximum over the window
  # positions. It must not be found by looking for elements equal to `y`: where
  # XLA computes `x` in two fusions, the two copies may differ by a rounding,
  # and no element of one equals the maximum of the other.
  y = _reduce_max(x, window, strides, padding)
  lowest = jnp.asarray(-jnp.inf, x.dtype)
  padded = lax.pad(x, lowest, [(low, high, 0) for low, high in padding])
  argmax = jnp.zeros(y.shape, jnp.uint32)
  chosen = None
  for k, start in enumerate(_window_offsets(window)):
    stop = [
      s + (n - 1) * step + 1
      for s, n, step in zip(start, y.shape, strides, strict=True)
    ]
    part = lax.slice(padded, start, stop, strides)
    if chosen is None:
      chosen = part
      continue
    # ">=" rather than ">": of several equal elements, the first one stays.
    stays = chosen >= part
    argmax = jnp.where(stays, argmax, jnp.uint32(k))
    chosen = jnp.where(stays, chosen, part)
  # The empty array carries the shape and dtype of `x` to the backward pass.
  like = jnp.zeros((0, *x.shape), x.dtype)
  return y, (_bits.pack_codes(argmax, _argmax_bits(window)), like)


def _backward(
  window: tuple[int, ...],
  strides: tuple[int, ...],
  padding: Padding,
  residuals: tuple[Array, Array],
  ct: Array,
) -> tuple[Array]:
  """Adds each window's cotangent to the element that was its maximum."""
  # Window positions are visited last to first: that is the order in which XLA
  # adds up the cotangents of overlapping windows, so the sums agree bit for
  # bit.
  words, like = residuals
  shape = like.shape[1:]
  argmax = _bits.unpack_codes(words, _argmax_bits(window), ct.shape)
  padded = [n + sum(p) for n, p in zip(shape, padding, strict=True)]
  zero = jnp.zeros((), ct.dtype)
  total = jnp.zeros(padded, ct.dtype)
  for k, start in reversed(list(enumerate(_window_offsets(window)))):
    part = jnp.where(argmax == k, ct, zero)
    edges = [
      (s, size - s - (n - 1) * step - 1, step - 1)
      for s, n, step, size in zip(start, ct.shape, strides, padded, strict=True)
    ]
    total += lax.pad(part, zero, edges)
  begin = [low for low, _ in padding]
  return (
    lax.slice(total, begin, [b + n for b, n in zip(begin, shape, strict=True)]),
  )


max_pool.defvjp(_forward, _backward)


def _window_offsets(window: Sequence[int]) -> Iterator[tuple[int, ...]]:
  """Yields the positions inside a window, in row-major order."""
  return itertools.product(*map(range, window))


def _argmax_bits(window: Sequence[int]) -> int:
  """Returns the bits that one position inside a window takes."""
  return _bits.code_width(math.prod(window))
