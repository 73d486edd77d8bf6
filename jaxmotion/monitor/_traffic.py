"""Bytes that one worker sends in an exchange, from the layout of its state."""

import collections
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from jaxmotion import checkpoint, codecs, core, transforms
from jaxmotion.checkpoint.extend import shard_shapes
from jaxmotion.core import PyTree
from jaxmotion.wire import step_bytes


class Traffic(NamedTuple):
  """Bytes that one worker sends in one exchange.

  Attributes:
    wire_bytes: with each level's codec.
    plain_bytes: without codecs.
    elements: number of elements that one device exchanges.
    element_bits: bits of these elements in their own dtypes.
  """

  wire_bytes: tuple[float, ...]
  plain_bytes: float
  elements: int
  element_bits: int


def count_traffic(
  layout: checkpoint.Layout,
  entry: checkpoint.ExchangeLayout | checkpoint.ShardedLayout,
) -> Traffic:
  """Counts the bytes that one worker sends, from the traced exchange."""
  # A fragment of `local_updates` has leaves that some rules match alone.
  with core.without_context_mesh(), core.allow_unused_rules():
    return _count_traffic(layout.workers, layout.model, entry)


# A loop asks at each step.
@functools.lru_cache(maxsize=256)
def _count_traffic(
  workers: tuple[tuple[str, int], ...],
  model: tuple[tuple[str, int], ...],
  entry: checkpoint.ExchangeLayout | checkpoint.ShardedLayout,
) -> Traffic:
  likes = list_shapes(entry, checkpoint.Layout(workers, model, ()))
  leaves = jax.tree.leaves(likes)
  if isinstance(entry, checkpoint.ExchangeLayout):
    wire = tuple(_trace(workers, entry, likes, c) for c in entry.codecs)
  else:
    coded = (entry.gradient_codec, entry.weight_codec)
    wire = (_trace(workers, entry, likes, *coded),)
  return Traffic(
    wire,
    _trace(workers, entry, likes, None),
    sum(math.prod(x.shape) for x in leaves),
    sum(8 * math.prod(x.shape) * x.dtype.itemsize for x in leaves),
  )


def list_shapes(
  entry: checkpoint.ExchangeLayout | checkpoint.ShardedLayout,
  layout: checkpoint.Layout,
) -> PyTree:
  """Returns what one device exchanges, by path, in the order of the tree."""
  whole = collections.OrderedDict(
    (path, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
    for path, shape, dtype in entry.leaves
  )
  return shard_shapes(whole, entry, layout)


def _trace(
  workers: tuple[tuple[str, int], ...],
  entry: checkpoint.ExchangeLayout | checkpoint.ShardedLayout,
  likes: PyTree,
  codec: codecs.Codec | None,
  weight_codec: codecs.Codec | None = None,
) -> float:
  """Returns the bytes that one worker sends, with other codecs."""
  names, lengths = zip(*workers, strict=True)
  mesh = AbstractMesh(
    lengths, names, axis_types=(AxisType.Auto,) * len(lengths)
  )
  tx: Any
  if isinstance(entry, checkpoint.ExchangeLayout):
    method = None if codec is None else entry.method
    tx = transforms.exchange(
      entry.axis_name, codec, method=method, local_axis=entry.local_axis
    )
  else:
    tx = transforms.sharded(
      entry.axis_name,
      optax.identity(),
      gradient_codec=codec,
      weight_codec=weight_codec,
      local_axis=entry.local_axis,
    )

  def update(grads: PyTree) -> PyTree:
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), grads)
    own = core.to_varying(grads, names)
    return tx.update(own, tx.init(params), params)[0]

  mapped = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P())
  # What the devices of a host exchange stays within it.
  inner = set(entry.local_axis or ())
  return math.fsum(
    move.wire_bytes
    for move in step_bytes(mapped, likes).moves
    if not inner & set(move.axes)
  )
