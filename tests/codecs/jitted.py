"""Jitted methods of codecs, which compile one program instead of many."""

import functools

import jax


@functools.partial(jax.jit, static_argnums=0)
def init(codec, like):
  """Returns `codec.init(like)`."""
  return codec.init(like)


@functools.partial(jax.jit, static_argnums=0)
def encode(codec, x, state=(), key=None):
  """Returns `codec.encode(x, state, key)`."""
  return codec.encode(x, state, key)


@functools.partial(jax.jit, static_argnums=0)
def decode(codec, payload, like):
  """Returns `codec.decode(payload, like)`."""
  return codec.decode(payload, like)
