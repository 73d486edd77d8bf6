"""All-reduce over two axes: in full within a host, compressed between hosts.

The devices of a host share its link. Each is given a part of the host's sum
first, so that what crosses the link is one payload for the whole host.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs import Codec, identity
from jaxmotion.codecs.extend import partition
from jaxmotion.collectives._adaptive import (
  all_reduce_adaptive,
  all_reduce_adaptive_init,
  check_level,
)
from jaxmotion.collectives._all_gather import all_gather
from jaxmotion.collectives._all_reduce import all_reduce, all_reduce_init
from jaxmotion.collectives._layout import is_cut, shard_like
from jaxmotion.collectives._reduce_scatter import reduce_scatter
from jaxmotion.collectives._shared import (
  cut_rows,
  straight_through,
  weigh,
)
from jaxmotion.core import (
  Array,
  AxisName,
  Key,
  PyTree,
  ShapedLike,
  axis_is_bound,
  axis_names,
  axis_size,
  check_choice,
  combine_seeds,
  to_varying,
  worker_index,
)


def joint_axes(axis_name: AxisName, local_axis: AxisName) -> tuple[Any, ...]:
  """Returns the axes of hosts and of their devices as one tuple.

  Args:
    axis_name: the axis of the hosts, or several.
    local_axis: the axis of the devices of one host, or several.

  Raises:
    ValueError: an axis is in both.

  Example:
    >>> joint_axes("host", "device")
    ('host', 'device')
  """
  hosts, devices = axis_names(axis_name), axis_names(local_axis)
  if set(hosts) & set(devices):
    raise ValueError(
      "`local_axis` must name axes other than `axis_name` = "
      f"{axis_name!r}, got {local_axis!r}."
    )
  return (*hosts, *devices)


def all_reduce_hierarchical_init(
  x: PyTree,
  axis_name: AxisName,
  local_axis: AxisName,
  codec: Codec | Sequence[Codec],
  *,
  method: str | None = None,
) -> list[PyTree]:
  """Returns the codec state for `all_reduce_hierarchical`.

  Args:
    x: pytree of arrays or ShapeDtypeStructs of the shapes to be reduced.
    axis_name: the axis of the hosts.
    local_axis: the axis of the devices of one host.
    codec: the codec between hosts, or those of a ladder.
    method: as for `all_reduce`.

  Returns:
    This worker's state: that of its shards, one entry for each array that is
    encoded.

  Raises:
    ValueError: the codec has state and an axis is not bound here.
  """
  both = joint_axes(axis_name, local_axis)
  # Where the codec remembers nothing, no shape depends on the devices.
  devices = axis_size(local_axis) if axis_is_bound(local_axis) else 1
  shards = jax.tree.map(lambda a: shard_like(a, devices), x)
  if isinstance(codec, Codec):
    states = all_reduce_init(shards, axis_name, codec, method=method)
  else:
    states = all_reduce_adaptive_init(shards, axis_name, codec, method=method)
  if not jax.tree.leaves(states):
    return states
  axis_size(local_axis)
  return to_varying(states, both)


def all_reduce_hierarchical(
  x: PyTree,
  axis_name: AxisName,
  local_axis: AxisName,
  codec: Codec | Sequence[Codec] | None = None,
  *,
  state: PyTree | None = None,
  key: Key | None = None,
  op: str = "mean",
  weight: Array | float | None = None,
  method: str | None = None,
  level: Any = None,
  local_codec: Codec | None = None,
) -> tuple[PyTree, PyTree]:
  r"""Reduces a tree over hosts and their devices; only hosts compress.

  With `H` hosts of `L` devices, device `d` of every host is given its `L`-th
  of the host's sum (a reduce-scatter over `local_axis`), exchanges it with the
  devices `d` of the other hosts through the codec, and gathers the other
  parts of the result (an all-gather over `local_axis`):

  .. math::
    y = gather_d \; allreduce_h \; scatter_d \; x

  What a device sends between hosts is `1 / L` of what `all_reduce` over
  `axis_name` would have it send, and error memory is `1 / L` of the size.
  Arrays of fewer than 64 values a device are not cut: every device exchanges
  the whole of the host's mean and all keep what the first one received. The
  result has the same bits on every worker. Its gradient is that of the
  uncompressed collective over both axes.

  Within the host, sums are made in float32 and rounded once to the dtype of
  `x`. With `identity()` the result is `lax.pmean` over both axes but for the
  order of the sum: within `2 H L eps mean(abs(x))`, with the `eps` of `x`.

  Args:
    x: pytree of floating-point arrays, this worker's own.
    axis_name: the axis of the hosts, or a tuple of axes.
    local_axis: the axis of the devices of one host, or a tuple of axes.
    codec: encodes what travels between hosts; None is `identity()`. A
      sequence is a ladder, of which `level` picks one. Rules see the paths of
      `x` and the shapes of the parts.
    state: what `all_reduce_hierarchical_init` or the last call returned.
    key: randomness for codecs that need it; its `worker` word should differ
      between workers of both axes and its `shared` word must not.
    op: "mean" or "sum" over all workers of both axes.
    weight: this worker's weight, a scalar, as for `all_reduce`: the mean is
      sum(weight x) / sum(weight) over all workers of both axes.
    method: "gather" or "two_phase" between hosts, as for `all_reduce`.
    level: int32[], equal on all workers; for a ladder and nothing else.
    local_codec: encodes what travels within the host: the shares of the
      reduce-scatter and, again, the parts of the result; None is full
      precision. It must be without state; `rules` are for leaves of `x`.

  Returns:
    The reduced tree, of the dtypes of `x`, and the new state.

  Raises:
    ValueError: an unbound axis, an axis in both `axis_name` and `local_axis`, a
      state of other shapes, an unknown `op`, a `local_codec` that has state
      or that joins leaves, a `level` without a ladder or none with one.
    TypeError: a leaf that is not floating-point.

  Example:
    >>> from jaxmotion import codecs
    >>> mesh = jax.sharding.Mesh([jax.devices()[:1]], ("host", "device"))
    >>> def mean(x):
    ...   codec = codecs.uniform(bits=8)
    ...   return all_reduce_hierarchical(x, "host", "device", codec)[0]
    >>> f = jax.shard_map(
    ...   mean, mesh=mesh, in_specs=jax.P(("host", "device")),
    ...   out_specs=jax.P(),
    ... )
    >>> jax.jit(f)(jnp.array([0.0, 127.0])).tolist()
    [0.0, 127.0]
  """
  codec = identity() if codec is None else codec
  check_choice("op", op, ("mean", "sum"))
  ladder = not isinstance(codec, Codec)
  if (level is not None) != ladder:
    raise ValueError(
      "`level` must be given for a ladder of codecs and for nothing else, "
      f"got {level!r} for codec {codec!r}."
    )
  both = joint_axes(axis_name, local_axis)
  axis_size(both)
  devices = axis_size(local_axis)
  locally = _local_codecs(local_codec, x, key)
  own = to_varying(jax.tree.map(lax.stop_gradient, x), both)
  if weight is not None:
    own = weigh(own, weight, both, op)
  leaves = jax.tree.leaves(own)
  treedef: Any = jax.tree.structure(own)
  parts = [
    _scatter(a, local_axis, devices, local, op)
    for a, local in zip(leaves, locally, strict=True)
  ]
  # Typed as varying throughout, or the rungs of a ladder would differ.
  tree = to_varying(treedef.unflatten(parts), both)
  options: dict[str, Any] = dict(state=state, key=key, op=op, method=method)
  if isinstance(codec, Codec):
    tree, state = all_reduce(tree, axis_name, codec, **options)
  else:
    level = check_level(level, len(codec), both)
    tree, state = all_reduce_adaptive(tree, axis_name, codec, level, **options)
  reduced = treedef.flatten_up_to(tree)
  y = _gather_all(reduced, leaves, local_axis, devices, locally)
  stock = lax.pmean if op == "mean" else lax.psum

  def plain(x: PyTree) -> PyTree:
    return stock(x if weight is None else weigh(x, weight, both, op), both)

  return straight_through(plain, x, treedef.unflatten(y)), state


class _Local(NamedTuple):
  """How a leaf travels within the host."""

  codec: Codec
  key: Key | None


def _local_codecs(
  codec: Codec | None, x: PyTree, key: Key | None
) -> list[_Local]:
  """The codec of every leaf within the host, and its key there."""
  cut = partition(identity() if codec is None else codec, x)
  chosen: dict[int, _Local] = {}
  for part, like in zip(cut.leaf_groups, cut.likes(), strict=True):
    if len(part.leaves) > 1:
      raise ValueError(
        "`local_codec` must encode every leaf by itself, got one that joins "
        f"some: {codec!r}."
      )
    if jax.tree.leaves(jax.eval_shape(part.codec.init, like)):
      raise ValueError(
        f"`local_codec` must be a codec without state, got {part.codec!r}."
      )
    (leaf,) = part.leaves
    # Not the key of the exchange between hosts: roundings are independent.
    own = (
      None if key is None else key.fold_path(f"within/{cut.leaves[leaf][0]}")
    )
    chosen[leaf] = _Local(part.codec, own)
  return [chosen[i] for i in range(len(cut.leaves))]


def _scatter(
  x: Array, local_axis: AxisName, devices: int, local: _Local, op: str
) -> Array:
  """This device's part of the host's result, or the whole of a small one."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if not is_cut(x, devices):
    stock = lax.pmean if op == "mean" else lax.psum
    return stock(wide, local_axis).astype(x.dtype)
  rows = cut_rows(wide, devices)
  (part,), _ = reduce_scatter(
    rows, local_axis, local.codec, key=local.key, op=op
  )
  return part.astype(x.dtype)


def _gather_all(
  reduced: list[Array],
  leaves: list[Array],
  local_axis: AxisName,
  devices: int,
  locally: list[_Local],
) -> list[Array]:
  """Whole leaves from the parts that the devices of a host hold."""
  gathered = [
    _gather(y, a, local_axis, devices, local) if is_cut(a, devices) else y
    for y, a, local in zip(reduced, leaves, locally, strict=True)
  ]
  whole = [i for i, a in enumerate(leaves) if not is_cut(a, devices)]
  if whole:
    # Devices may have rounded the same mean differently: all take the first's.
    first = worker_index(local_axis) == 0
    kept = lax.psum(
      [jnp.where(first, reduced[i], 0) for i in whole], local_axis
    )
    for i, y in zip(whole, kept, strict=True):
      gathered[i] = y
  return gathered


def _gather(
  part: Array,
  like: ShapedLike,
  local_axis: AxisName,
  devices: int,
  local: _Local,
) -> Array:
  key = local.key
  if key is not None:
    # Equal on all hosts: each of them encodes the same part.
    own = combine_seeds(key.shared, worker_index(local_axis))
    key = Key(key.shared, own).fold(devices)
  rows, _ = all_gather(part, local_axis, local.codec, key=key)
  flat = rows.reshape(-1)[: math.prod(like.shape)]
  return flat.reshape(like.shape)
