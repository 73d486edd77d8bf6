"""All-reduce of a tree through a codec: the mean or sum over workers.

The tree is partitioned into arrays, each with its codec and one of the methods
of `_methods`. All arrays advance in lockstep (`_rounds`) and share their
collectives: unless a codec needs rounds of its own, a step takes at most one
sum, one all-to-all and one gather. With `HostAxes` each device first gets a
shard of the host's sum, so the host sends one payload over its link.

Invariant: all workers decode the same payloads in the same order, so the result
has the same bits everywhere. Parameters would otherwise drift apart.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import Partition, check_codec, partition
from jaxmotion.collectives import (
  _arguments,
  _layout,
  _methods,
  _moves,
  _rounds,
  _states,
)
from jaxmotion.core import Array, AxisName, PyTree

Codecs = codecs.Codec | Sequence[codecs.Codec]


@core.declare(
  x=core.typed_arrays,
  axis_name=_arguments.check_axes,
  codec=_arguments.check_codecs,
  method=core.choice(_layout.METHODS),
)
def all_reduce_init(
  x: PyTree, axis_name: AxisName, codec: Codecs, *, method: str | None = None
) -> list[PyTree]:
  """Returns the codec state for `all_reduce` of a tree like `x`.

  Args:
    x: pytree of arrays or ShapeDtypeStructs of the shapes to be reduced.
    axis_name: the workers' axis, a tuple of axes, or `HostAxes`.
    codec: codec that `all_reduce` will be given, or a sequence with one codec
      for each level.
    method: "gather", "two_phase" or None, as `all_reduce` will be given.

  Returns:
    This worker's state, one entry for each array that is encoded, or for
    several that are encoded together. With `HostAxes` it is that of
    shards. Codecs of several levels share it.

  Raises:
    ValueError: the codec has state and an axis is not bound here, no codecs, or
      codecs whose states differ in shape.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.feedback(codecs.uniform(bits=8))
    >>> def run(x):
    ...   state = all_reduce_init(x, "data", codec)
    ...   return all_reduce(x, "data", codec, state=state)[0]
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   run, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
    ... )
    >>> jax.eval_shape(f, jnp.ones(4)).shape
    (4,)
  """
  return init_tree(x, axis_name, codec, method)


def init_tree(
  x: PyTree, axis_name: AxisName, codec: Codecs, method: str | None
) -> list[PyTree]:
  """Returns the codec state for `reduce_tree` with the same arguments."""
  # Several codecs, one for each level, share a state: what it remembers has to
  # have the same shapes for all of them.
  workers, devices = core.split_axes(axis_name)
  if devices:
    # If the codec has no state, no shape depends on the number of devices.
    count = core.axis_size(devices) if core.axis_is_bound(devices) else 1
    x = jax.tree.map(lambda a: _layout.shard_like(a, count), x)
  if isinstance(codec, codecs.Codec):
    states = _init_states(x, workers, codec, method)
  else:
    states, *others = (
      _init_states(x, workers, one, method, canonical=True) for one in codec
    )
    for one, other in zip(codec[1:], others, strict=True):
      if not core.same_shapes(other, states):
        raise ValueError(
          "`codec` must have codecs with states of the same shapes (wrap them "
          f"all in feedback, or none), got {codec[0]!r} and {one!r}."
        )
  if not devices or not jax.tree.leaves(states):
    return states
  core.axis_size(devices)  # Raises if the axis is not bound.
  return core.settle_state(states, axis_name)


def _init_states(
  x: PyTree,
  axis_name: AxisName,
  codec: codecs.Codec,
  method: str | None,
  canonical: bool = False,
) -> list[PyTree]:
  """Returns the state of one codec, in canonical form where levels share it."""
  arrays = partition(codec, x)
  # Without state, no shape depends on the number of workers.
  empty = _find_empty(arrays)
  if empty is not None:
    return empty
  workers = core.axis_size(axis_name)
  plans = _layout.plan_arrays(arrays, workers, method, needs_rows=canonical)
  if not canonical:
    return core.settle_state(_states.init_states(plans), axis_name)
  states = core.settle_state(list(map(_states.init_state, plans)), axis_name)
  return list(map(_states.canonical_state, plans, states))


@core.declare(
  x=core.typed_arrays,
  axis_name=_arguments.check_axes,
  codec=core.optional(_arguments.check_codecs),
  state=core.arrays,
  key=core.optional_key,
  op=core.choice(("mean", "sum")),
  weight=_arguments.check_weight,
  method=core.choice(_layout.METHODS),
  local_codec=core.optional(functools.partial(check_codec, trees=True)),
)
def all_reduce(
  x: PyTree,
  axis_name: AxisName,
  codec: Codecs | None = None,
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
  r"""Returns the mean (or with `op="sum"` the sum) of a tree over workers.

  Call it inside `shard_map` or `pmap`. All payloads travel in one collective
  for each word width (two for the two-phase method). The result has the same
  bits on every worker and is typed as not varying. Its gradient is that of the
  uncompressed collective.

  With a sequence of codecs, `level` selects one of them at run time. The
  program compiles once for all levels and sends only the chosen codec's bytes,
  because the branch is around the collective.

  With `HostAxes` only hosts compress. Of `H` hosts of `L` devices, device `d`
  of every host gets its `L`-th of the host's sum, by a reduce-scatter over the
  devices. It exchanges that shard with the devices `d` of the other hosts
  through the codec. Then it gathers the other shards of the result, by an
  all-gather over the devices:

  .. math::
    y = gather_d \; allreduce_h \; scatter_d \; x

  What a device sends between hosts is `1 / L` of what it would send without
  the other devices, and error memory is `1 / L` of the size. Arrays of fewer
  than 64 elements per device are not sharded. Every device exchanges the host's
  whole mean, and all keep what the first one received. Within the host, sums
  are made in float32 and rounded once to the dtype of `x`. With `identity()`
  the result is `lax.pmean` over both axes but for the order of the sum: within
  `2 H L eps mean(abs(x))`, with the `eps` of `x`.

  Args:
    x: pytree of floating-point arrays, this worker's own.
    axis_name: the workers' axis, a tuple of axes, or `HostAxes`.
    codec: codec of the payloads; None is `identity()`, which makes this
      `lax.pmean` (or `psum`) bit for bit. Only float16 is added up in
      float32, because a sum overflows where the mean does not. A sequence has
      one codec for each level; their states must have the same shapes. Between
      hosts, rules see the paths of `x` and the shapes of the shards.
    state: what `all_reduce_init` or the last call returned.
    key: randomness for codecs that need it; its `worker` word should differ
      between workers and its `shared` word must not.
    op: "mean" or "sum" over workers.
    weight: this worker's weight, a scalar. The mean becomes
      sum(weight x) / sum(weight), the sum becomes sum(weight x). Weights are
      applied before the codec, so before error memory is added. If all weights
      are zero, so is the mean. Negative weights follow the formula. If a
      weight is not finite, or if others than zeros cancel, the mean is not
      finite on any worker.
    method: "gather" sends every payload to every worker. "two_phase" is a
      reduce-scatter and an all-gather: each worker gets its part of all
      payloads, then sends the encoded mean of the part to all. That encodes
      twice, but its bytes do not grow with the workers. None gathers between 2
      workers and otherwise takes two phases. Payloads of summable codecs are
      summed, but small ones beside others are gathered between 2 workers.
      Arrays of fewer than 64 elements per worker are always gathered. A codec
      of rounds, such as `low_rank`, has messages of its own.
    level: int32[], equal on all workers; given for a sequence of codecs only. A
      traced level out of range is clamped to the nearest one.
    local_codec: codec within a host, of the shards of the reduce-scatter and,
      again, of the shards of the result; None is full precision. It must be
      without state; `rules` are for leaves of `x`.
    sending: what the `update` of a transformation is given by
      `make_train_step`: how a step of several programs sends. None: the step is
      one program.

  Returns:
    The reduced tree, of the dtypes of `x`, and the new state. Sums are made in
    float32; finite ones that a narrower dtype does not hold saturate.

  Raises:
    ValueError: an unbound axis, a state of other shapes, an unknown `op`. A
      level that may differ between workers, that is given for one codec, or is
      missing for several. A `local_codec` without hosts, that has state, or
      that joins leaves.
    TypeError: a leaf that is not floating-point, a level that is no integer.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import HostAxes, codecs
    >>> int8, axes = codecs.uniform(bits=8), HostAxes("host", "device")
    >>> mesh = jax.sharding.Mesh([jax.devices()[:1]], axes.names)
    >>> def mean(x):
    ...   return all_reduce(x, axes, int8)[0]  # Or one axis, such as "host".
    >>> f = jax.shard_map(
    ...   mean, mesh=mesh, in_specs=jax.P(axes.names), out_specs=jax.P()
    ... )
    >>> jax.jit(f)(jnp.array([0.0, 127.0])).tolist()
    [0.0, 127.0]
    >>> levels = [codecs.uniform(bits=2), codecs.identity()]
    >>> f = jax.jit(jax.shard_map(
    ...   lambda x, level: all_reduce(x, axes, levels, level=level)[0],
    ...   mesh=mesh, in_specs=(jax.P(axes.names), jax.P()), out_specs=jax.P(),
    ... ))
    >>> x = jnp.array([1.0, 0.25])
    >>> f(x, 0).tolist(), f(x, 1).tolist()
    ([1.0, 0.0], [1.0, 0.25])
  """
  codec = codecs.identity() if codec is None else codec
  _arguments.check_level_given(level, codec)
  _arguments.check_local_codec(axis_name, local_codec)
  return reduce_tree(
    x,
    axis_name,
    codec,
    state=state,
    key=key,
    op=op,
    weight=weight,
    method=method,
    level=level,
    local_codec=local_codec,
    sending=hosts.check_sending(sending),
  )


def reduce_tree(
  x: PyTree,
  axis_name: AxisName,
  codec: Codecs,
  *,
  method: str | None = None,
  sending: hosts.Sending = hosts.AT_ONCE,
  level: Any = None,
  local_codec: codecs.Codec | None = None,
  **options: Any,
) -> tuple[PyTree, PyTree]:
  """Does what `all_reduce` does, with arguments that are checked."""
  options |= dict(method=method, sending=sending)
  if isinstance(axis_name, core.HostAxes):
    return _reduce_by_hosts(x, axis_name, codec, level, local_codec, **options)
  if isinstance(codec, codecs.Codec):
    return _reduce_arrays(x, axis_name, codec, **options)
  return _reduce_at_level(x, axis_name, codec, level, **options)


def _reduce_by_hosts(
  x: PyTree,
  axes: core.HostAxes,
  codec: Codecs,
  level: Any,
  local_codec: codecs.Codec | None,
  *,
  key: core.Key | None = None,
  op: str = "mean",
  weight: Array | float | None = None,
  sending: hosts.Sending = hosts.AT_ONCE,
  **options: Any,
) -> tuple[PyTree, PyTree]:
  """Reduces within hosts, then between hosts, then shares the result."""
  both, local_axis = axes.names, axes.devices
  core.axis_size(both)
  # Other keys than those of the exchange between hosts, so that roundings are
  # independent. The prefix is part of every random bit: do not rename it.
  local_codecs = _rounds.find_leaf_codecs(
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
  if not isinstance(codec, codecs.Codec):
    level = _arguments.check_level(level, len(codec), both)
  options |= dict(key=key, op=op, sending=sending, level=level)
  tree, state = reduce_tree(tree, axes.hosts, codec, **options)
  reduced, leaves = treedef.flatten_up_to(tree), jax.tree.leaves(x)
  y = _gather_shards(reduced, leaves, local_axis, local_codecs, sending)
  reference_op = _arguments.reference_reduce(both, op, weight)
  return _arguments.straight_through(
    reference_op, x, treedef.unflatten(y)
  ), state


def _reduce_at_level(
  x: PyTree,
  axis_name: AxisName,
  levels: Sequence[codecs.Codec],
  level: Any,
  state: PyTree,
  **options: Any,
) -> tuple[PyTree, PyTree]:
  """Reduces a tree through the codec that a level selects at run time."""
  level = _arguments.check_level(level, len(levels), axis_name)
  fresh = init_tree(x, axis_name, levels, options["method"])
  options |= dict(canonical=bool(jax.tree.leaves(fresh)))

  def reduce(codec: codecs.Codec, x: PyTree, state: PyTree) -> Any:
    y, state = _reduce_arrays(x, axis_name, codec, state=state, **options)
    return core.to_varying_like(y, x, axis_name), state

  branches = [functools.partial(reduce, codec) for codec in levels]
  level = options["sending"].order_branch(level)
  return lax.switch(level, branches, x, state)


def _reduce_arrays(
  x: PyTree,
  axis_name: AxisName,
  codec: codecs.Codec,
  *,
  state: PyTree | None = None,
  key: core.Key | None = None,
  op: str = "mean",
  weight: Array | float | None = None,
  method: str | None = None,
  sending: hosts.Sending = hosts.AT_ONCE,
  canonical: bool = False,
) -> tuple[PyTree, PyTree]:
  """Reduces the arrays of a tree through one codec."""
  # canonical: whether codecs of several levels share the state. Payloads are
  # divided otherwise by each codec, and the error memory of a part's mean would
  # be of other elements at another level. So such codecs encode rows.
  workers = core.axis_size(axis_name)
  arrays = partition(codec, x)
  plans, expected, canonical_shapes = _plan_tree(
    arrays, axis_name, workers, method, op, canonical
  )
  states = _arguments.check_state(expected, state, canonical_shapes)
  own = core.to_varying(jax.tree.map(lax.stop_gradient, x), axis_name)
  own = _arguments.apply_weight(own, weight, axis_name, op)
  is_stacked = _states.is_stacked(expected, canonical)
  if not is_stacked:
    states = _states.stack_states(plans, states)
  own_arrays = [
    core.saturate_cast(a, plan.like.dtype)
    for plan, a in zip(plans, arrays.split(own), strict=True)
  ]
  totals, states = _methods.reduce_arrays(
    plans, own_arrays, states, arrays.array_keys(key), axis_name, sending
  )
  y = arrays.merge(
    [
      core.saturate_cast(total, like.dtype)
      for total, like in zip(totals, arrays.array_likes(), strict=True)
    ]
  )
  if any(core.is_varying(leaf, axis_name) for leaf in jax.tree.leaves(y)):
    raise ValueError(
      "`codec` must make the mean of replies and of `Shared` state alone, so "
      f"that it is equal on all workers, got {codec!r}, whose mean varies."
    )
  states = core.settle_state(states, axis_name)
  if not is_stacked:
    states = _states.unstack_states(plans, states)
  if canonical:
    states = list(map(_states.canonical_state, plans, states))
  reference_op = _arguments.reference_reduce(axis_name, op, weight)
  return _arguments.straight_through(reference_op, x, y), states


def _find_empty(arrays: Partition) -> list[_states.ReduceState] | None:
  """Returns empty states if no codec of the arrays has any; else None."""
  if any(group.codec.has_state for group in arrays.leaf_groups):
    return None
  return [_states.ReduceState((), ()) for _ in arrays.leaf_groups]


# A step is traced several times, and to trace the states takes long.
@functools.lru_cache(maxsize=1024)
def _plan_tree(
  arrays: Partition,
  axis_name: AxisName,
  workers: int,
  method: str | None,
  op: str,
  needs_rows: bool,
) -> tuple[list[_layout.ArrayPlan], PyTree, PyTree]:
  """Returns how arrays are reduced, and the shapes of their codecs' state."""
  # needs_rows: whether the codec changes between steps. All its codecs then
  # encode rows, and keep their state in one form, whose shapes come last.
  plans = _layout.plan_arrays(
    arrays, workers, method, op=op, needs_rows=needs_rows
  )
  empty_states = _find_empty(arrays)
  if empty_states is not None:
    return plans, empty_states, None

  def make_states() -> tuple[PyTree, PyTree]:
    if not needs_rows:
      return core.name_axes(_states.init_states(plans), axis_name), None
    states = core.name_axes(list(map(_states.init_state, plans)), axis_name)
    return states, list(map(_states.canonical_state, plans, states))

  states = jax.eval_shape(make_states)
  # Later calls get these shapes too, but shardings are of this call's mesh.
  return plans, *jax.tree.map(core.shape_dtype, states)


def _reduce_locally(
  x: Array, like: Array, local: _rounds.LeafCodec, local_axis: AxisName, op: str
) -> Array:
  """Returns this device's shard of the host's result; a small array whole."""
  devices = core.axis_size(local_axis)
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  if not _layout.is_sharded(x, devices):
    y = _arguments.reference_reduce(local_axis, op, None)(wide)
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
  local_codecs: list[_rounds.LeafCodec],
  sending: hosts.Sending,
) -> list[Array]:
  """Returns whole leaves from the shards that the devices of a host hold."""
  devices = core.axis_size(local_axis)
  gathered, whole = list(reduced), []
  for i, (like, local) in enumerate(zip(leaves, local_codecs, strict=True)):
    if not _layout.is_sharded(like, devices):
      whole.append(i)
      continue
    key = local.key
    if key is not None:
      # Equal on all hosts, which each encode the same shard: otherwise the
      # result would have other bits on another host.
      own = core.combine_seeds(key.shared, core.worker_index(local_axis))
      key = core.Key(key.shared, own).fold(devices)
    rows, _ = _moves.all_gather(
      reduced[i], local_axis, local.codec, key=key, sending=sending
    )
    gathered[i] = _layout.join_flat(rows, like.shape)
  if whole:
    # Each device encoded the same mean with its own key, so the results may
    # differ by their rounding: all take the first device's.
    is_first = core.worker_index(local_axis) == 0
    firsts = lax.psum(
      [jnp.where(is_first, reduced[i], 0) for i in whole], local_axis
    )
    for i, y in zip(whole, firsts, strict=True):
      gathered[i] = y
  return gathered
