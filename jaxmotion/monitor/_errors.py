"""Norms of the error memory of exchanges, from their states."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import checkpoint, core, kernels, transforms
from jaxmotion.codecs import Codec, feedback, onebit
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives.extend import find_leaf_codecs, shard_like
from jaxmotion.core import Array, PyTree
from jaxmotion.monitor import _traffic
from jaxmotion.transforms.extend import cut_leaf, select_whole


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
    states = state.codec_state.value
    for codec, own in _pair_states(state, states, entry, layout):
      errors += _find_errors(codec, own)
  if not errors:
    return None
  return sum(
    (jnp.sum(e**2, tuple(range(1, e.ndim))) for e in errors),
    jnp.zeros(()),
  )


def _pair_states(
  state: Any,
  states: PyTree,
  entry: checkpoint.ExchangeLayout | checkpoint.ShardedLayout,
  layout: checkpoint.Layout,
) -> list[tuple[Codec, PyTree]]:
  """Returns every codec of an exchange, with its state."""
  likes = _traffic.list_shapes(entry, layout)
  sizes = dict(layout.workers)
  if not isinstance(entry, checkpoint.ShardedLayout):
    devices = 1
    for name in entry.local_axis or ():
      devices *= sizes[name]
    if entry.local_axis is not None:
      likes = jax.tree.map(lambda a: shard_like(a, devices), likes)
    return _pair_groups(entry.codecs[0], likes, states)
  assert isinstance(state, transforms.ShardedState)
  workers = 1
  for name in (*entry.axis_name, *(entry.local_axis or ())):
    workers *= sizes[name]
  leaves = jax.tree.leaves(likes)
  specs = entry.specs or [()] * len(leaves)
  cuts = [
    cut_leaf(x, workers, [i for i, names in enumerate(spec) if names])
    for x, spec in zip(leaves, specs, strict=True)
  ]
  codecs = find_leaf_codecs("gradient_codec", entry.gradient_codec, likes)
  rows, whole_states = states
  cut_codecs = [
    leaf.codec
    for leaf, cut in zip(codecs, cuts, strict=True)
    if cut.dimension is not None
  ]
  whole = select_whole(likes, cuts)
  return [
    *zip(cut_codecs, rows, strict=True),
    *_pair_groups(entry.gradient_codec, whole, whole_states),
  ]


def _pair_groups(
  codec: Codec, likes: PyTree, states: PyTree
) -> list[tuple[Codec, PyTree]]:
  with core.allow_unused_rules():
    groups = partition(codec, likes).leaf_groups
  return [(group.codec, own) for group, own in zip(groups, states, strict=True)]


def _find_errors(codec: Codec, state: PyTree) -> list[Array]:
  """Returns what a codec has still to send, with leading axes of rows."""
  if isinstance(codec, onebit):
    return jax.tree.leaves(state)
  while not isinstance(codec, feedback) and hasattr(codec, "codec"):
    codec = codec.codec
  if not isinstance(codec, feedback):
    return []
  read: Any = functools.partial(kernels.error_of, codec.codec.decode)

  def is_memory(node: Any) -> bool:
    return isinstance(node, kernels.ErrorMemory)

  errors = []
  for node in jax.tree.leaves(state, is_leaf=is_memory):
    if is_memory(node):
      run = read
      for _ in range(node.count.ndim):
        run = jax.vmap(run)
      errors.append(run(node))
  return errors
