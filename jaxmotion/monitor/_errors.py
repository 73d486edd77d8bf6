"""Norms of the error memory of exchanges, from their states."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import checkpoint, transforms
from jaxmotion.checkpoint.extend import parts_layout, state_layout
from jaxmotion.collectives.extend import read_pending, read_states, shard_like
from jaxmotion.core import Array, PyTree
from jaxmotion.monitor import _traffic


def error_squares(
  exchanges: list[Any], layout: checkpoint.Layout
) -> Array | None:
  """Returns the squared norm of each worker's error memory."""
  # Returns float32[workers]; None if there is no error memory.
  entries = iter(layout.exchanges)
  known = tuple(
    None if isinstance(state, transforms.FullyShardedState) else next(entries)
    for state in exchanges
  )
  return _sum_squares(exchanges, known, layout._replace(exchanges=()))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _sum_squares(
  exchanges: list[Any], entries: tuple[Any, ...], layout: checkpoint.Layout
) -> Array | None:
  errors: list[Array] = []
  for state, entry in zip(exchanges, entries, strict=True):
    if entry is None:
      errors += jax.tree.leaves(state.error)
      continue
    errors += _find_errors(state.codec_state.value, entry, layout)
  if not errors:
    return None
  return sum(
    (jnp.sum(e**2, tuple(range(1, e.ndim))) for e in errors),
    jnp.zeros(()),
  )


def _find_errors(
  states: PyTree,
  entry: checkpoint.ExchangeLayout,
  layout: checkpoint.Layout,
) -> list[Array]:
  """Returns what is still to be sent, with a leading axis of workers."""
  likes = _traffic.list_shapes(entry, layout)
  if not entry.is_sharded:
    kept = state_layout(entry, layout)
    if (devices := kept.devices) is not None:
      likes = jax.tree.map(lambda a: shard_like(a, devices), likes)
    return read_pending(states, likes, kept)
  parts = parts_layout(entry, layout)
  cut_states, whole_states = states
  errors = read_pending(whole_states, *parts.find_whole(likes))
  cut = [
    leaf for leaf in parts.pair_leaves(likes) if leaf[0].dimension is not None
  ]
  for (_, codec, like), rows in zip(cut, cut_states, strict=True):
    found = read_states(codec, rows, like, 2)
    errors += [found[p.name] for p in codec.memory_parts if p.is_pending]
  return errors
