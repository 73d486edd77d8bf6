"""All-reduce over two axes: in full within a host, compressed between hosts.

The devices of a host share its link. Each device first gets a shard of the
host's sum, so the host sends one payload over the link, not one per device.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives import (
  _adaptive,
  _all_reduce,
  _arguments,
  _layout,
  _moves,
  _shards,
  _straight_through,
)
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike


def all_reduce_hierarchical_init(
  x: PyTree,
  axes: core.HostAxes,
  codec: codecs.Codec | Sequence[codecs.Codec],
  *,
  method: str | None = None,
) -> list[PyTree]:
  """Returns the codec state for `all_reduce_hierarchical` of a tree like `x`.

  Args:
    x: pytree of arrays or ShapeDtypeStructs of the shapes to be reduced.
    axes: the axes of the hosts and of the devices of one host.
    codec: codec between hosts, or a sequence with one codec for each level.
    method: "gather", "two_phase" or None, as for `all_reduce`.

  Returns:
    This worker's state: that of its shards, one entry for each array that is
    encoded.

  Raises:
    ValueError: the codec has state and an axis is not bound here.

  Example:
    >>> from jaxmotion import HostAxes, codecs
    >>> codec = codecs.feedback(codecs.uniform(bits=8))
    >>> axes = HostAxes("host", "device")
    >>> def run(x):
    ...   state = all_reduce_hierarchical_init(x, axes, codec)
    ...   return all_reduce_hierarchical(x, axes, codec, state=state)[0]
    >>> mesh = jax.sharding.Mesh([jax.devices()[:1]], axes.names)
    >>> f = jax.shard_map(
    ...   run, mesh=mesh, in_specs=jax.P(axes.names), out_specs=jax.P()
    ... )
    >>> jax.eval_shape(f, jnp.ones(4)).shape
    (4,)
  """
  _check_axes(axes)
  core.check_arrays("x", x, numbers=False)
  if not isinstance(codec, codecs.Codec):
    _arguments.check_codecs("codec", codec)
  # If the codec has no state, no shape depends on the number of devices.
  devices = 1
  if core.axis_is_bound(axes.devices):
    devices = core.axis_size(axes.devices)
  shards = jax.tree.map(lambda a: _layout.shard_like(a, devices), x)
  init: Any = _adaptive.all_reduce_adaptive_init
  if isinstance(codec, codecs.Codec):
    init = _all_reduce.all_reduce_init
  states = init(shards, axes.hosts, codec, method=method)
  if not jax.tree.leaves(states):
    return states
  core.axis_size(axes.devices, "axes")
  return core.settle_state(states, axes)


def all_reduce_hierarchical(
  x: PyTree,
  axes: core.HostAxes,
  codec: codecs.Codec | Sequence[codecs.Codec] | None = None,
  *,
  state: PyTree | None = None,
  key: core.Key | None = None,
  op: str = "mean",
  weight: Array | float | None = None,
  method: str | None = None,
  level: Any = None,
  local_codec: codecs.Codec | None = None,
  sending: hosts.Sending | None = None,
) -> tuple[PyTree, PyTree]:
  r"""Returns the mean (or sum) over hosts and devices; only hosts compress.

  With `H` hosts of `L` devices, device `d` of every host gets its `L`-th of the
  host's sum, by a reduce-scatter over `axes.devices`. It exchanges that shard
  with the devices `d` of the other hosts through the codec. Then it gathers the
  other shards of the result, by an all-gather over `axes.devices`:

  .. math::
    y = gather_d \; allreduce_h \; scatter_d \; x

  What a device sends between hosts is `1 / L` of what `all_reduce` over
  `axes.hosts` would have it send, and error memory is `1 / L` of the size.
  Arrays of fewer than 64 elements per device are not sharded. Every device
  exchanges the host's whole mean, and all keep what the first one received. The
  result has the same bits on every worker. Its gradient is that of the
  uncompressed collective over both axes.

  Within the host, sums are made in float32 and rounded once to the dtype of
  `x`. With `identity()` the result is `lax.pmean` over both axes but for the
  order of the sum: within `2 H L eps mean(abs(x))`, with the `eps` of `x`.

  Args:
    x: pytree of floating-point arrays, this worker's own.
    axes: the axes of the hosts and of the devices of one host.
    codec: codec of the payloads between hosts; None is `identity()`. A sequence
      has one codec for each level, of which `level` selects one. Rules see the
      paths of `x` and the shapes of the shards.
    state: what `all_reduce_hierarchical_init` or the last call returned.
    key: randomness for codecs that need it; its `worker` word should differ
      between workers of both axes and its `shared` word must not.
    op: "mean" or "sum" over all workers of both axes.
    weight: this worker's weight, a scalar, as for `all_reduce`: the mean is
      sum(weight x) / sum(weight) over all workers of both axes.
    method: "gather" or "two_phase" between hosts, as for `all_reduce`.
    level: int32[], equal on all workers; given for a sequence of codecs only.
    local_codec: codec within the host, of the shards of the reduce-scatter and,
      again, of the shards of the result; None is full precision. It must be
      without state; `rules` are for leaves of `x`.
    sending: how a step of several programs sends, as for `all_reduce`.

  Returns:
    The reduced tree, of the dtypes of `x`, and the new state.

  Raises:
    ValueError: an axis is unbound. `state` has other shapes, or `op` is
      unknown. `local_codec` has state or joins leaves. `level` is given for one
      codec, or is missing for several.
    TypeError: a leaf that is not floating-point, or `axes` are no `HostAxes`.

  Example:
    >>> from jaxmotion import HostAxes, codecs
    >>> axes = HostAxes("host", "device")
    >>> mesh = jax.sharding.Mesh([jax.devices()[:1]], axes.names)
    >>> def mean(x):
    ...   return all_reduce_hierarchical(x, axes, codecs.uniform(bits=8))[0]
    >>> f = jax.shard_map(
    ...   mean, mesh=mesh, in_specs=jax.P(axes.names), out_specs=jax.P()
    ... )
    >>> jax.jit(f)(jnp.array([0.0, 127.0])).tolist()
    [0.0, 127.0]
  """
  _check_axes(axes)
  codec = codecs.identity() if codec is None else codec
  options = _all_reduce.check_options(
    x, axes.hosts, state, key, op, weight, method, sending
  )
  if local_codec is not None:
    check_codec("local_codec", local_codec, trees=True)
  _arguments.check_level_given(level, codec)
  both, local_axis = axes.names, axes.devices
  core.axis_size(axes.hosts, "axes")
  core.axis_size(local_axis, "axes")
  # Other keys than those of the exchange between hosts, so that roundings are
  # independent. The prefix is part of every random bit: do not rename it.
  local_codecs = _shards.find_leaf_codecs(
    "local_codec", local_codec, x, key, prefix="within/", stateless=True
  )
  own = core.to_varying(jax.tree.map(lax.stop_gradient, x), both)
  own = _arguments.apply_weight(own, weight, both, op)
  treedef: Any = jax.tree.structure(x)
  reduce = functools.partial(_reduce_locally, local_axis=local_axis, op=op)
  tree = jax.tree.map(reduce, own, x, treedef.unflatten(local_codecs))
  # Typed as varying over both axes; otherwise the branches of the levels would
  # differ in type.
  tree = core.to_varying(tree, both)
  options |= dict(state=state, weight=None)  # Weights are applied.
  if isinstance(codec, codecs.Codec):
    tree, state = _all_reduce.reduce_tree(tree, axes.hosts, codec, **options)
  else:
    level = _adaptive.check_level(level, len(codec), both)
    tree, state = _adaptive.all_reduce_adaptive(
      tree, axes.hosts, codec, level, **options
    )
  reduced, leaves = treedef.flatten_up_to(tree), jax.tree.leaves(x)
  y = _gather_shards(
    reduced, leaves, local_axis, local_codecs, options["sending"]
  )
  reference_op = _straight_through.reference_reduce(both, op, weight)
  return _straight_through.straight_through(
    reference_op, x, treedef.unflatten(y)
  ), state


def _check_axes(axes: Any) -> None:
  """Raises unless the axes of hosts and of their devices are given."""
  noun = 'a jaxmotion.HostAxes, such as HostAxes("host", "device")'
  core.check_instance("axes", axes, core.HostAxes, noun)


def _reduce_locally(
  x: Array,
  like: Array,
  local: _shards.LeafCodec,
  local_axis: AxisName,
  op: str,
) -> Array:
  """Returns this device's shard of the host's result; a small array whole."""
  devices = core.axis_size(local_axis)
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if not _layout.is_sharded(x, devices):
    y = _straight_through.reference_reduce(local_axis, op, None)(wide)
    return core.saturate_cast(y, like.dtype)
  rows = _layout.pad_to_rows(wide, devices)
  (shard,), _ = _moves.reduce_scatter(
    rows, local_axis, local.codec, key=local.key, op=op
  )
  return core.saturate_cast(shard, like.dtype)


def _gather_shards(
  reduced: list[Array],
  leaves: list[Array],
  local_axis: AxisName,
  local_codecs: list[_shards.LeafCodec],
  sending: hosts.Sending,
) -> list[Array]:
  """Returns whole leaves from the shards that the devices of a host hold."""
  devices = core.axis_size(local_axis)
  gathered, whole = list(reduced), []
  for i, (like, local) in enumerate(zip(leaves, local_codecs, strict=True)):
    if _layout.is_sharded(like, devices):
      gathered[i] = _gather_leaf(reduced[i], like, local_axis, local, sending)
    else:
      whole.append(i)
  if whole:
    # Each device encoded the same mean with its own key, so the results may
    # differ by their rounding: all take the first device's.
    is_first = core.worker_index(local_axis) == 0
    kept = lax.psum(
      [jnp.where(is_first, reduced[i], 0) for i in whole], local_axis
    )
    for i, y in zip(whole, kept, strict=True):
      gathered[i] = y
  return gathered


def _gather_leaf(
  shard: Array,
  like: ShapedLike,
  local_axis: AxisName,
  local: _shards.LeafCodec,
  sending: hosts.Sending,
) -> Array:
  key = local.key
  if key is not None:
    # Equal on all hosts, which each encode the same shard: otherwise the result
    # would have other bits on another host.
    own = core.combine_seeds(key.shared, core.worker_index(local_axis))
    key = core.Key(key.shared, own).fold(core.axis_size(local_axis))
  rows, _ = _moves.all_gather(
    shard, local_axis, local.codec, key=key, sending=sending
  )
  return _layout.join_flat(rows, like.shape)
