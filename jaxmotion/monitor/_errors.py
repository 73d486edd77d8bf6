"""Norms of the error memory of exchanges, from their states."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import transforms
from jaxmotion.collectives.extend import read_pending, read_states, shard_like
from jaxmotion.core import Array
from jaxmotion.monitor import _traffic
from jaxmotion.transforms.extend import parts_layout


@functools.partial(jax.jit, static_argnums=1)
def error_squares(exchanges: list[Any], sizes: _traffic.Sizes) -> Array | None:
  """Returns the squared norm of each worker's error memory."""
  # Returns float32[workers]; None if there is no error memory.
  errors: list[Array] = []
  for state in exchanges:
    if isinstance(state, transforms.FullyShardedState):
      errors += jax.tree.leaves(state.error)
    else:
      errors += _find_errors(state, dict(sizes))
  if not errors:
    return None
  return sum(
    (jnp.sum(e**2, tuple(range(1, e.ndim))) for e in errors),
    jnp.zeros(()),
  )


def _find_errors(state: Any, sizes: Mapping[str, int]) -> list[Array]:
  """Returns what is still to be sent, with a leading axis of workers."""
  options, states = state.made_for, state.codec_state.value
  if isinstance(state, transforms.ExchangeState):
    likes, kept = options.shard_params(sizes), options.state_layout(sizes)
    if (devices := kept.devices) is not None:
      likes = jax.tree.map(lambda a: shard_like(a, devices), likes)
    return read_pending(states, likes, kept)
  parts = parts_layout(options, sizes)
  cut_states, whole_states = states
  errors = read_pending(whole_states, parts.whole, parts.whole_layout)
  cut = [leaf for leaf in parts.leaves if leaf[0].is_cut]
  for (_, codec, like), rows in zip(cut, cut_states, strict=True):
    found = read_states(codec, rows, like, 2)
    errors += [found[p.name] for p in codec.memory_parts if p.is_pending]
  return errors
