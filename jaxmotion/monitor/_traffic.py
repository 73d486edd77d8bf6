"""Bytes that one worker sends in an exchange, from the state of it."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from jaxmotion import codecs, core
from jaxmotion.checkpoint.extend import make_transformation
from jaxmotion.core import PyTree
from jaxmotion.transforms.extend import Options, ShardedOptions
from jaxmotion.wire import step_bytes

# Name and length of every axis of the exchanges.
Sizes = tuple[tuple[str, int], ...]


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


# A loop asks at each step.
@functools.lru_cache(maxsize=256)
def count_traffic(options: Options, sizes: Sizes) -> Traffic:
  """Counts the bytes that one worker sends, from the traced exchange."""
  likes = options.shard_params(dict(sizes))
  leaves = jax.tree.leaves(likes)
  *coded, plain = (
    _trace_bytes(one, likes, dict(sizes)) for one in _list_levels(options)
  )
  return Traffic(
    tuple(coded),
    plain,
    sum(math.prod(x.shape) for x in leaves),
    sum(8 * math.prod(x.shape) * x.dtype.itemsize for x in leaves),
  )


def _list_levels(options: Options) -> list[Options]:
  """Returns the options of each level's codec, and those without codecs."""
  changes: list[dict[str, Any]]
  plain = codecs.identity()
  if isinstance(options, ShardedOptions):
    changes = [{}, {"gradient_codec": plain, "weight_codec": None}]
  else:
    changes = [{"codec": codec} for codec in options.codecs]
    changes.append({"codec": plain, "method": None})
  return [dataclasses.replace(options, **change) for change in changes]


def _trace_bytes(
  options: Options, likes: PyTree, sizes: dict[str, int]
) -> float:
  """Returns the bytes that one worker sends in an exchange of one level."""
  names = core.axis_names(options.axis_name)
  mesh = AbstractMesh(
    tuple(sizes[name] for name in names),
    names,
    axis_types=(AxisType.Auto,) * len(names),
  )
  tx = make_transformation(options)

  def update(grads: PyTree) -> PyTree:
    params = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), grads)
    own = core.to_varying(grads, names)
    return tx.update(own, tx.init(params), params)[0]

  mapped = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P())
  with core.without_context_mesh():
    moves = step_bytes(mapped, likes).moves
  # What the devices of a host exchange stays within it.
  inner = set(core.axis_names(core.split_axes(options.axis_name)[1]))
  return math.fsum(
    move.wire_bytes for move in moves if not inner & set(move.axes)
  )
