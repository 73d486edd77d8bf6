"""Layout of the error memory of gradients that workers cut between them."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from jaxmotion import core
from jaxmotion.codecs import Codec
from jaxmotion.collectives.extend import StateLayout, find_leaf_codecs
from jaxmotion.core import PyTree
from jaxmotion.transforms import _exchange
from jaxmotion.transforms.parts import _shard_layout


class PartsLayout(NamedTuple):
  """Determines how `sharded` keeps its error memory.

  Attributes:
    hosts: number of workers, or of hosts if devices of a host reduce first.
    devices: number of devices of one host that reduce first, or 1.
    leaves: the division of each leaf, its codec and the shape of a part.
    whole: shapes of the leaves that all workers reduce whole.
    whole_layout: how they keep the states of these.
  """

  hosts: int
  devices: int
  leaves: list[tuple[_shard_layout.LeafCut, Codec, jax.ShapeDtypeStruct]]
  whole: PyTree
  whole_layout: StateLayout


def parts_layout(
  options: _exchange.ShardedOptions, sizes: Mapping[str, int]
) -> PartsLayout:
  """Returns how the devices of a mesh keep the error memory of `sharded`."""
  # sizes: length of every axis of the mesh.
  params, codec = options.shard_params(sizes), options.gradient_codec
  hosts, devices = (
    _exchange.count_devices(axes, sizes)
    for axes in core.split_axes(options.axis_name)
  )
  cuts = [
    _shard_layout.cut_leaf(
      x, hosts * devices, [i for i, names in enumerate(leaf.spec) if names]
    )
    for x, leaf in zip(jax.tree.leaves(params), options.leaves, strict=True)
  ]
  codecs = find_leaf_codecs("gradient_codec", codec, params)
  leaves = [
    (cut, own.codec, jax.ShapeDtypeStruct(cut.shard_shape(), leaf.like.dtype))
    for cut, own, leaf in zip(cuts, codecs, options.leaves, strict=True)
  ]
  return PartsLayout(
    hosts,
    devices,
    leaves,
    _shard_layout.select_whole(params, cuts),
    StateLayout(codec, hosts * devices),
  )
