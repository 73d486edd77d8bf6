"""Small integer codes: masks, and the argmax of max pooling, packed in bits.

`kernels.pack` reads codes that are in memory, 32 bits each. For a mask, that
is 32 times what is saved of it. Here the codes are the operand of a reduction,
so the compiler computes them inside the pass that packs them.

A word holds neighboring codes of the last axes, and the axes before these
stay. A compiler that partitions the array then packs each part where it is.
Words whose codes are far apart would make it reduce over the devices.

The backward pass of max pooling reads only the position of the argmax in each
window, 1 to 8 bits; JAX's own gradient saves the whole operand.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import core
from jaxmotion.core import Array
from jaxmotion.program import Step

# One comparison per window position: for larger windows, finding the argmax
# takes too many passes over the operand.
_LARGEST_WINDOW = 64


def code_width(count: int) -> int:
  """Returns the least power of two of bits that tells `count` codes apart.

  >>> [code_width(count) for count in (2, 4, 9, 49)]
  [1, 2, 4, 8]
  """
  bits = max(1, (count - 1).bit_length())
  return 1 << (bits - 1).bit_length()


@core.trace_in_place
def pack_codes(codes: Array, bits: int) -> Array:
  """Packs codes of any shape into ceil(size * bits / 32) uint32 words."""
  per_word = 32 // bits
  rows = codes.reshape(_word_rows(codes.shape, per_word))
  if padding := -rows.shape[-1] % per_word:
    rows = jnp.pad(rows, (0, padding))
  groups = rows.reshape(*rows.shape[:-1], -1, per_word).astype(jnp.uint32)
  # The sum of shifted codes has no carries. A reduction by `or` would say so,
  # but compilers that partition programs cannot run it across devices.
  words = groups << _code_shifts(bits, groups.ndim)
  return jnp.sum(words, -1, dtype=jnp.uint32)


def packed_like(shape: tuple[int, ...], bits: int) -> jax.ShapeDtypeStruct:
  """Returns the type of what `pack_codes` makes of codes of a shape.

  >>> packed_like((8, 4, 6, 16), 1), packed_like((3, 5), 2).shape
  (ShapeDtypeStruct(shape=(8, 4, 3), dtype=uint32), (1,))
  """
  *rows, last = _word_rows(shape, 32 // bits)
  return jax.ShapeDtypeStruct((*rows, -(-last * bits // 32)), jnp.uint32)


@core.trace_in_place
def unpack_codes(words: Array, bits: int, shape: tuple[int, ...]) -> Array:
  """Inverts `pack_codes`; returns uint32 codes of the given shape.

  >>> codes = jnp.arange(10) % 4
  >>> unpack_codes(pack_codes(codes, 2), 2, (2, 5)).tolist()
  [[0, 1, 2, 3, 0], [1, 2, 3, 0, 1]]
  """
  rows = _word_rows(shape, 32 // bits)
  shifts = _code_shifts(bits, words.ndim + 1)
  codes = (words[..., None] >> shifts) & jnp.uint32(2**bits - 1)
  codes = codes.reshape(*rows[:-1], -1)
  if codes.shape[-1] > rows[-1]:
    codes = codes[: rows[-1]]
  return codes.reshape(shape)


def _code_shifts(bits: int, ndim: int) -> Array:
  """Returns by how many bits each code of a word is shifted."""
  # A vector, since XLA computes an array of positions of the codes' shape once
  # for a whole loop: for the masks of an attention, 512 MiB.
  shifts = jnp.uint32(bits) * lax.iota(jnp.uint32, 32 // bits)
  return shifts.reshape((1,) * (ndim - 1) + shifts.shape)


def _word_rows(shape: tuple[int, ...], per_word: int) -> tuple[int, ...]:
  """Returns a shape with the last axes merged until they fill whole words.

  Where no number of axes does, all are merged, and the last word is not full.

  >>> _word_rows((8, 4, 6, 16), 32), _word_rows((3, 5), 32)
  ((8, 4, 96), (15,))
  """
  last = 1
  for axis in reversed(range(len(shape))):
    last *= shape[axis]
    if last % per_word == 0:
      return (*shape[:axis], last)
  return (last,)


class Window(NamedTuple):
  """Window of a pooling, as `lax.reduce_window` takes it."""

  shape: tuple[int, ...]
  strides: tuple[int, ...]
  padding: tuple[tuple[int, int], ...]

  @property
  def argmax_bits(self) -> int:
    """Bits that a position inside the window takes."""
    return code_width(math.prod(self.shape))

  def offsets(self) -> Iterator[tuple[int, ...]]:
    """Yields the positions inside the window, in row-major order."""
    return itertools.product(*map(range, self.shape))


def is_max_pool(step: Step) -> bool:
  """Says whether a step is max pooling that `max_pool` can evaluate."""
  if step.name != "reduce_window_max":
    return False
  params = step.params
  dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
  floats = jnp.issubdtype(step.outs[0].aval.dtype, jnp.floating)
  size = math.prod(params["window_dimensions"])
  return floats and not dilated and 1 < size <= _LARGEST_WINDOW


def evaluate_max_pool(step: Step, x: Array) -> Array:
  """Evaluates a max-pooling step by `max_pool`."""
  names = ("window_dimensions", "window_strides")
  shape, strides = (tuple(step.params[name]) for name in names)
  return max_pool(x, Window(shape, strides, tuple(step.params["padding"])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def max_pool(x: Array, window: Window) -> Array:
  """Computes max pooling with a gradient that does not read `x`."""
  # The gradient of a window goes to the element that that of
  # `lax.reduce_window` goes to: the first of the largest ones. No comparison
  # holds for NaN, so a NaN takes the place of what comes before it, and what
  # comes next takes its own.
  return lax.reduce_window(x, -jnp.inf, lax.max, *window)


def _forward(x: Array, window: Window) -> tuple[Array, tuple[Array, Array]]:
  """Returns the maxima, and as residuals the packed argmax of each window."""
  # The argmax comes from the comparisons of a running maximum over the window
  # positions. It must not be found by looking for elements equal to `y`: where
  # XLA computes `x` in two fusions, the two copies may differ by a rounding,
  # and no element of one equals the maximum of the other.
  y = lax.reduce_window(x, -jnp.inf, lax.max, *window)
  lowest = jnp.asarray(-jnp.inf, x.dtype)
  padded = lax.pad(x, lowest, [(low, high, 0) for low, high in window.padding])
  argmax = jnp.zeros(y.shape, jnp.uint32)
  chosen = None
  for k, start in enumerate(window.offsets()):
    stop = [
      s + (n - 1) * step + 1
      for s, n, step in zip(start, y.shape, window.strides, strict=True)
    ]
    part = lax.slice(padded, start, stop, window.strides)
    if chosen is None:
      chosen = part
      continue
    # ">=" rather than ">": of several equal elements, the first one stays.
    stays = chosen >= part
    argmax = jnp.where(stays, argmax, jnp.uint32(k))
    chosen = jnp.where(stays, chosen, part)
  # The empty array carries the shape and dtype of `x` to the backward pass.
  like = jnp.zeros((0, *x.shape), x.dtype)
  return y, (pack_codes(argmax, window.argmax_bits), like)


def _backward(
  window: Window, residuals: tuple[Array, Array], ct: Array
) -> tuple[Array]:
  """Adds each window's cotangent to the element that was its maximum."""
  # Window positions are visited last to first: that is the order in which XLA
  # adds up the cotangents of overlapping windows, so the sums agree bit for
  # bit.
  words, like = residuals
  shape = like.shape[1:]
  argmax = unpack_codes(words, window.argmax_bits, ct.shape)
  padded = [n + sum(p) for n, p in zip(shape, window.padding, strict=True)]
  zero = jnp.zeros((), ct.dtype)
  total = jnp.zeros(padded, ct.dtype)
  for k, start in reversed(list(enumerate(window.offsets()))):
    part = jnp.where(argmax == k, ct, zero)
    sizes = zip(start, ct.shape, window.strides, padded, strict=True)
    edges = [
      (s, size - s - (n - 1) * step - 1, step - 1) for s, n, step, size in sizes
    ]
    total += lax.pad(part, zero, edges)
  begin = [low for low, _ in window.padding]
  end = [b + n for b, n in zip(begin, shape, strict=True)]
  return (lax.slice(total, begin, end),)


max_pool.defvjp(_forward, _backward)
