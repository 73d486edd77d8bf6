"""Attention in two ways: all scores at once, or blocks of them."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.ad_checkpoint import checkpoint_name

from jaxmotion.core import Array

_LOWEST = -1e30

Drop = Callable[[Array], Array]
Attend = Callable[[Array, Array, Array, Drop], Array]


def attend_all(
  q: Array, k: Array, v: Array, drop: Drop, *, causal: bool = True
) -> Array:
  """Computes attention from all scores: two products, dropout in between."""
  channels = q.shape[-1]
  scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(channels).astype(
    q.dtype
  )
  scores = checkpoint_name(scores, "scores")
  scores = scores.astype(jnp.float32)
  if causal:
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores, _LOWEST)
  weights = drop(nn.softmax(scores, -1).astype(q.dtype))
  return jnp.einsum("bhts,bshd->bthd", weights, v)


def attend_blocks(q: Array, k: Array, v: Array, drop: Drop) -> Array:
  """Computes attention block by block, as a flash kernel does."""
  return _flash(q, k, v)


@jax.custom_vjp
def _flash(q: Array, k: Array, v: Array) -> Array:
  return _run_forward(q, k, v)[0]


def _run_forward(
  q: Array, k: Array, v: Array
) -> tuple[Array, tuple[Array, ...]]:
  """Returns attention and what the gradient needs: no scores."""
  out, log_sum = _scan_keys(q, k, v)
  return out, (q, k, v, out, log_sum)


def _split_blocks(x: Array, size: int) -> Array:
  """Moves blocks of positions to a leading axis."""
  batch, length, *rest = x.shape
  blocks = x.reshape(batch, length // size, size, *rest)
  return jnp.moveaxis(blocks, 1, 0)


def _block_size(length: int) -> int:
  return min(128, length)


def _score_block(q: Array, k: Array, first: Array) -> Array:
  """Returns the masked scores of all queries and one block of keys."""
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  scores = product("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
  key_at = first + jnp.arange(k.shape[1])
  is_seen = jnp.arange(q.shape[1])[:, None] >= key_at[None]
  return jnp.where(is_seen, scores, _LOWEST)


def _scan_keys(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
  """Returns attention and the logarithms of the softmax's sums."""
  size = _block_size(q.shape[1])
  batch, length, heads, channels = q.shape

  def add_block(carry: tuple, block: tuple) -> tuple[tuple, None]:
    highest, total, out = carry
    first, keys, values = block
    scores = _score_block(q, keys, first)
    higher = jnp.maximum(highest, scores.max(-1))
    weights = jnp.exp(scores - higher[..., None])
    scale = jnp.exp(highest - higher)
    added = jnp.einsum(
      "bhts,bshd->bhtd",
      weights.astype(values.dtype),
      values,
      preferred_element_type=jnp.float32,
    )
    out = out * scale[..., None] + added
    return (higher, total * scale + weights.sum(-1), out), None

  shape = (batch, heads, length)
  start = (
    jnp.full(shape, _LOWEST),
    jnp.zeros(shape),
    jnp.zeros((*shape, channels)),
  )
  firsts = jnp.arange(0, length, size)
  blocks = (firsts, _split_blocks(k, size), _split_blocks(v, size))
  (highest, total, out), _ = lax.scan(add_block, start, blocks)
  out = (out / total[..., None]).swapaxes(1, 2).astype(q.dtype)
  return out, highest + jnp.log(total)


def _run_backward(
  saved: tuple[Array, ...], ct: Array
) -> tuple[Array, Array, Array]:
  """Computes the scores of each block of keys again, and the gradients."""
  q, k, v, out, log_sum = saved
  size = _block_size(q.shape[1])
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  inner = product("bthd,bthd->bht", ct, out)

  def add_block(dq: Array, block: tuple) -> tuple[Array, tuple]:
    first, keys, values = block
    weights = jnp.exp(_score_block(q, keys, first) - log_sum[..., None])
    dv = product("bhts,bthd->bshd", weights.astype(ct.dtype), ct)
    dweights = product("bthd,bshd->bhts", ct, values)
    dscores = weights * (dweights - inner[..., None]) / q.shape[-1] ** 0.5
    dscores = dscores.astype(q.dtype)
    dk = product("bhts,bthd->bshd", dscores, q)
    dq = dq + product("bhts,bshd->bthd", dscores, keys)
    return dq, (dk, dv)

  firsts = jnp.arange(0, q.shape[1], size)
  blocks = (firsts, _split_blocks(k, size), _split_blocks(v, size))
  dq, (dk, dv) = lax.scan(add_block, jnp.zeros(q.shape, jnp.float32), blocks)
  join = lambda x: jnp.moveaxis(x, 0, 1).reshape(k.shape).astype(k.dtype)
  return dq.astype(q.dtype), join(dk), join(dv)


_flash.defvjp(_run_forward, _run_backward)
