"""A maximum over windows that remembers where it was, in a few bits."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array
from jaxmotion.memory.residuals.trace._bits import pack, unpack, width
from jaxmotion.program import Step

Padding = tuple[tuple[int, int], ...]
# Of larger windows the places take many passes.
_LARGEST = 64


def is_max_pool(step: Step) -> bool:
  """Says whether a step is a maximum over windows that `max_pool` can take."""
  if step.name != "reduce_window_max":
    return False
  params = step.eqn.params
  dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
  floats = jnp.issubdtype(step.outs[0].aval.dtype, jnp.floating)
  size = math.prod(params["window_dimensions"])
  return floats and not dilated and 1 < size <= _LARGEST


def evaluate_max_pool(step: Step, x: Array) -> Array:
  """Does such a step."""
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
  """The maximum over windows, with a gradient that does not read `x`.

  The gradient of a window goes to the first of its largest values, as that of
  `lax.reduce_window` does; of a window that holds NaN, to its first value.
  """
  return _largest(x, window, strides, padding)


def _largest(
  x: Array, window: tuple[int, ...], strides: tuple[int, ...], padding: Padding
) -> Array:
  return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)


def _forward(
  x: Array, window: tuple[int, ...], strides: tuple[int, ...], padding: Padding
) -> tuple[Array, tuple[Array, Array]]:
  y = _largest(x, window, strides, padding)
  lowest = jnp.asarray(-jnp.inf, x.dtype)
  wide = lax.pad(x, lowest, [(low, high, 0) for low, high in padding])
  place = jnp.zeros(y.shape, jnp.uint32)
  most = jnp.full(y.shape, lowest)
  # Not by looking for `y`: where XLA computes `x` twice, the two may differ by
  # a rounding, and none of one would be found in the other.
  for k, start in enumerate(_places(window)):
    stop = [
      s + (n - 1) * step + 1
      for s, n, step in zip(start, y.shape, strides, strict=True)
    ]
    part = lax.slice(wide, start, stop, strides)
    # The first of several equals stays.
    place = jnp.where(part > most, jnp.uint32(k), place)
    most = jnp.maximum(part, most)
  place = jnp.where(jnp.isnan(most), jnp.uint32(0), place)
  # Nothing of `x` but its shape and dtype is needed again.
  return y, (pack(place, _bits(window)), jnp.zeros((0, *x.shape), x.dtype))


def _backward(
  window: tuple[int, ...],
  strides: tuple[int, ...],
  padding: Padding,
  kept: tuple[Array, Array],
  ct: Array,
) -> tuple[Array]:
  words, like = kept
  shape = like.shape[1:]
  place = unpack(words, _bits(window), ct.shape)
  wide = [n + sum(p) for n, p in zip(shape, padding, strict=True)]
  zero = jnp.zeros((), ct.dtype)
  total = jnp.zeros(wide, ct.dtype)
  # In the order in which XLA adds up what several windows give to one value.
  for k, start in reversed(list(enumerate(_places(window)))):
    part = jnp.where(place == k, ct, zero)
    edges = [
      (s, size - s - (n - 1) * step - 1, step - 1)
      for s, n, step, size in zip(start, ct.shape, strides, wide, strict=True)
    ]
    total += lax.pad(part, zero, edges)
  begin = [low for low, _ in padding]
  return (
    lax.slice(total, begin, [b + n for b, n in zip(begin, shape, strict=True)]),
  )


max_pool.defvjp(_forward, _backward)


def _places(window: Sequence[int]) -> Iterator[tuple[int, ...]]:
  return itertools.product(*map(range, window))


def _bits(window: Sequence[int]) -> int:
  return width(math.prod(window))
