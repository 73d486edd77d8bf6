"""Bytes that one worker sends in an exchange, from the layout of its state."""

import collections
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from jaxmotion import checkpoint, core
from jaxmotion.checkpoint.extend import make_transformation, shard_shapes
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
  entry: checkpoint.ExchangeLayout,
) -> Traffic:
  """Counts the bytes that one worker sends, from the traced exchange."""
  with core.without_context_mesh():
    return _count_traffic(layout.workers, layout.model, entry)


# A loop asks at each step.
@functools.lru_cache(maxsize=256)
def _count_traffic(
  workers: tuple[tuple[str, int], ...],
  model: tuple[tuple[str, int], ...],
  entry: checkpoint.ExchangeLayout,
) -> Traffic:
  likes = list_shapes(entry, checkpoint.Layout(workers, model, ()))
  leaves = jax.tree.leaves(likes)
  nothing: Any = None
  plain = entry._replace(codecs=(nothing,), weight_codec=None, method=None)
  return Traffic(
    tuple(
      _trace(workers, entry._replace(codecs=(c,)), likes) for c in entry.codecs
    ),
    _trace(workers, plain, likes),
    sum(math.prod(x.shape) for x in leaves),
    sum(8 * math.prod(x.shape) * x.dtype.itemsize for x in leaves),
  )


def list_shapes(
  entry: checkpoint.ExchangeLayout,
  layout: checkpoint.Layout,
) -> PyTree:
  """Returns what one device exchanges, by path, in the order of the tree."""
  whole: Any = collections.OrderedDict(
    (path, jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)))
    for path, shape, dtype in entry.leaves
  )
  # A fragment lacks leaves that some rules match alone: it is marked as a part.
  whole[None] = optax.MaskedNode()
  return shard_shapes(whole, entry, layout)


def _trace(
  workers: tuple[tuple[str, int], ...],
  entry: checkpoint.ExchangeLayout,
  likes: PyTree,
) -> float:
  """Returns the bytes that one worker sends in an exchange of one level."""
  names, lengths = zip(*workers, strict=True)
  mesh = AbstractMesh(
    lengths, names, axis_types=(AxisType.Auto,) * len(lengths)
  )
  tx = make_transformation(entry)

  def update(grads: PyTree) -> PyTree:
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), grads)
    own = core.to_varying(grads, names)
    return tx.update(own, tx.init(params), params)[0]

  mapped = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P())
  # What the devices of a host exchange stays within it.
  inner = set(core.axis_names(core.split_axes(entry.axis_name)[1]))
  return math.fsum(
    move.wire_bytes
    for move in step_bytes(mapped, likes).moves
    if not inner & set(move.axes)
  )
