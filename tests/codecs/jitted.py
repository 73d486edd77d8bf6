"""Jitted methods of codecs, which compile one program instead of many."""

import functools

import jax
import numpy as np


def normal(*shape, seed=0):
  """Returns normally distributed elements, float32."""
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def _round_trip(codec, x, key):
  payload, _ = codec.encode(x, codec.init(x), key)
  return payload, codec.decode(payload, x)


def trip(codec, x, key=None):
  """Returns the payload of an array and what it decodes to."""
  payload, y = _round_trip(codec, x, key)
  return payload, np.asarray(y)


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
