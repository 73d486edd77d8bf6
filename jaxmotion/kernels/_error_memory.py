"""Sums with decoded payloads, for any codec."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, PyTree, ShapedLike, update_in_place

# Up to this many payloads are decoded by code of their own, which fuses into
# one pass; beyond, a loop keeps the program short.
_UNROLL_MOST = 16
# Inside a kernel, where each takes registers.
UNROLL_IN_KERNEL = 8


class ErrorMemory(NamedTuple):
  """What an array's error is the difference of.

  Attributes:
    value: float32 of the array's shape, the last value to be encoded.
    sent: the payload it was encoded to; `()` if `value` is the error itself.
    count: int32[], encodings so far; nothing was sent before the first.
  """

  value: Array
  sent: PyTree
  count: Array  # type: ignore[assignment]


def clear_error(error: Array) -> Array:
  """Returns the error with 0 in place of what is not finite."""
  return jnp.where(jnp.isfinite(error), error, 0.0)


def error_of(decode: Callable[..., Array], memory: ErrorMemory) -> Array:
  """Returns the remembered error, float32.

  Args:
    decode: (payload, like) -> array.
    memory: of one array.
  """
  if not jax.tree.leaves(memory.sent):
    return memory.value
  error = clear_error(memory.value - decode(memory.sent, memory.value))
  # Nothing was sent yet, and what a payload of zeros stands for is not said.
  return jnp.where(memory.count > 0, error, 0.0)


def add_error(
  decode: Callable[..., Array], x: Array, memory: ErrorMemory, decay: float
) -> Array:
  """Returns x + decay * error, float32, where `memory.value` was.

  Args:
    decode: (payload, like) -> array.
    x: floating array.
    memory: of that array.
    decay: factor on the error.
  """

  def add(value: Array, sent: PyTree) -> Array:
    error = error_of(decode, ErrorMemory(value, sent, memory.count))
    return x.astype(jnp.float32) + error * decay

  return update_in_place(add, memory.value, memory.sent, memory.count)


def sum_decoded(
  decode: Callable[..., Array], payloads: PyTree, like: ShapedLike
) -> Array:
  """Decodes payloads of several workers and adds them, in their order.

  Args:
    decode: (payload, like) -> array.
    payloads: a payload whose leaves have a leading axis of workers.
    like: shape and dtype of the array that each of them encoded.

  Returns:
    The sum, in float32 or the wider dtype of `like`.
  """
  dtype = jnp.promote_types(like.dtype, jnp.float32)
  count = jax.tree.leaves(payloads)[0].shape[0]

  def one(w: Any) -> Array:
    payload = jax.tree.map(lambda a: a[w], payloads)
    return decode(payload, like).astype(dtype)

  return add_in_order(one, count, _UNROLL_MOST)


def add_in_order(
  one: Callable[[Any], Array], count: int, unroll_most: int
) -> Array:
  """Returns one(0) + one(1) + ..., added from the left.

  Args:
    one: position -> array.
    count: how many there are.
    unroll_most: up to this many are code of their own.
  """
  total = one(0)
  if count <= unroll_most:
    for w in range(1, count):
      total = total + one(w)
    return total
  return lax.fori_loop(1, count, lambda w, t: t + one(w), total)
