"""All-reduce of a tree through a codec: the mean or sum over workers.

The tree is first partitioned into arrays, each with its codec. Every array is
then reduced by one of the methods of `_methods`, chosen in `_layout`. All
arrays advance in lockstep (`_rounds`) and share their collectives. Unless a
codec needs rounds of its own, a step takes at most one sum, one all-to-all and
one gather, whatever the tree.

Invariant: all workers decode the same payloads in the same order, so the result
has the same bits everywhere. No worker uses its own elements unencoded.
Parameters would otherwise drift apart.
"""

import functools
from typing import Any

import jax
from jax import lax

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import Partition, check_codec, partition
from jaxmotion.collectives import (
  _arguments,
  _layout,
  _methods,
  _states,
  _straight_through,
)
from jaxmotion.core import Array, AxisName, PyTree


def all_reduce_init(
  x: PyTree,
  axis_name: AxisName,
  codec: codecs.Codec,
  *,
  method: str | None = None,
) -> list[PyTree]:
  """Returns the codec state for `all_reduce` of a tree like `x`.

  Args:
    x: pytree of arrays or ShapeDtypeStructs of the shapes to be reduced.
    axis_name: the workers' axis.
    codec: codec that `all_reduce` will be given.
    method: "gather", "two_phase" or None, as `all_reduce` will be given.

  Returns:
    This worker's state, one entry for each array that is encoded.

  Raises:
    ValueError: the codec has state and the axis is not bound here.

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
  core.check_arrays("x", x, numbers=False)
  core.check_axis_name("axis_name", axis_name)
  check_codec("codec", codec, trees=True)
  core.check_choice("method", method, _layout.METHODS)
  return init_tree(x, axis_name, codec, method)


def init_tree(
  x: PyTree,
  axis_name: AxisName,
  codec: codecs.Codec,
  method: str | None,
  canonical: bool = False,
) -> list[PyTree]:
  """Returns the codec state for `reduce_tree` with the same arguments."""
  arrays = partition(codec, x)
  # Without state, no shape depends on the number of workers.
  if not _has_state(arrays) and not core.axis_is_bound(axis_name):
    return _make_empty(arrays)
  workers = core.axis_size(axis_name)
  plans = _layout.plan_arrays(arrays, workers, method, by_rows=canonical)
  states = list(map(_states.init_state, plans))
  states = core.settle_state(states, axis_name)
  if canonical:
    return list(map(_states.canonical_state, plans, states))
  return states


def all_reduce(
  x: PyTree,
  axis_name: AxisName,
  codec: codecs.Codec | None = None,
  *,
  state: PyTree | None = None,
  key: core.Key | None = None,
  op: str = "mean",
  weight: Array | float | None = None,
  method: str | None = None,
  sending: hosts.Sending | None = None,
) -> tuple[PyTree, PyTree]:
  """Returns the mean (or with `op="sum"` the sum) of a tree over workers.

  Call it inside `shard_map` or `pmap`. All payloads travel in one collective
  for each word width (two for the two-phase method). The result has the same
  bits on every worker and is typed as not varying. Its gradient is that of the
  uncompressed collective.

  Args:
    x: pytree of floating-point arrays, this worker's own.
    axis_name: the workers' axis, or a tuple of axes.
    codec: codec of the payloads; None is `identity()`, which makes this
      `lax.pmean` (or `psum`) bit for bit. Only float16 is added up in
      float32, because a sum overflows where the mean does not.
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
    sending: what the `update` of a transformation is given by
      `make_train_step`: how a step of several programs sends. None: the step is
      one program.

  Returns:
    The reduced tree, of the dtypes of `x`, and the new state. Sums are made in
    float32; finite ones that a narrower dtype does not hold saturate.

  Raises:
    ValueError: an unbound axis, a state of other shapes, an unknown `op`.
    TypeError: a leaf that is not floating-point.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion import codecs
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def mean(x):
    ...   return all_reduce(x, "data", codecs.uniform(bits=8))[0]
    >>> f = jax.shard_map(
    ...   mean, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
    ... )
    >>> jax.jit(f)(jnp.array([0.0, 127.0])).tolist()
    [0.0, 127.0]
  """
  codec = codecs.identity() if codec is None else codec
  check_codec("codec", codec, trees=True)
  options = check_options(x, axis_name, state, key, op, weight, method, sending)
  return reduce_tree(x, axis_name, codec, state=state, **options)


def check_options(
  x: PyTree,
  axis_name: AxisName,
  state: PyTree | None,
  key: core.Key | None = None,
  op: str = "mean",
  weight: Array | float | None = None,
  method: str | None = None,
  sending: hosts.Sending | None = None,
) -> dict[str, Any]:
  """Returns options of `reduce_tree`, or raises."""
  core.check_arrays("x", x, numbers=False)
  core.check_axis_name("axis_name", axis_name)
  core.check_arrays("state", state)
  _arguments.check_key(key)
  core.check_choice("op", op, ("mean", "sum"))
  _arguments.check_weight(weight)
  core.check_choice("method", method, _layout.METHODS)
  return dict(
    key=key,
    op=op,
    weight=weight,
    method=method,
    sending=hosts.check_sending(sending),
  )


def reduce_tree(
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
  """Does what `all_reduce` does, with arguments that are checked."""
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
  reductions = [
    _methods.Reduction(plan, core.saturate_cast(a, plan.like.dtype), s, k)
    for plan, a, s, k in zip(
      plans,
      arrays.split(own),
      states,
      arrays.array_keys(key),
      strict=True,
    )
  ]
  results = _methods.reduce_arrays(reductions, axis_name, sending)
  y = arrays.merge(
    [
      core.saturate_cast(total, like.dtype)
      for (total, _), like in zip(results, arrays.array_likes(), strict=True)
    ]
  )
  _check_equal(y, codec, axis_name)
  states = core.settle_state([state for _, state in results], axis_name)
  if canonical:
    states = list(map(_states.canonical_state, plans, states))
  reference_op = _straight_through.reference_reduce(axis_name, op, weight)
  return _straight_through.straight_through(reference_op, x, y), states


def _check_equal(y: PyTree, codec: codecs.Codec, axis_name: AxisName) -> None:
  if any(core.is_varying(leaf, axis_name) for leaf in jax.tree.leaves(y)):
    raise ValueError(
      "`codec` must make the mean of replies and of `Shared` state alone, so "
      f"that it is equal on all workers, got {codec!r}, whose mean varies."
    )


def _has_state(arrays: Partition) -> bool:
  return any(group.codec.has_state for group in arrays.leaf_groups)


def _make_empty(arrays: Partition) -> list[_states.ReduceState]:
  """Returns the states of codecs without state."""
  return [_states.ReduceState((), ()) for _ in arrays.leaf_groups]


# A step is traced several times, and to trace the states takes long.
@functools.lru_cache(maxsize=1024)
def _plan_tree(
  arrays: Partition,
  axis_name: AxisName,
  workers: int,
  method: str | None,
  op: str,
  by_rows: bool,
) -> tuple[list[_layout.ArrayPlan], PyTree, PyTree]:
  """Returns plans of arrays, shapes of their states and of canonical ones."""
  plans = _layout.plan_arrays(arrays, workers, method, op=op, by_rows=by_rows)
  if not _has_state(arrays):
    return plans, _make_empty(arrays), None

  def make_states() -> tuple[PyTree, PyTree]:
    states = core.name_axes(list(map(_states.init_state, plans)), axis_name)
    if not by_rows:  # Only levels share states, which are then canonical.
      return states, None
    return states, list(map(_states.canonical_state, plans, states))

  found = jax.eval_shape(make_states)
  # The types of a map's mesh belong to this call; the shapes hold for all.
  return plans, *jax.tree.map(core.shape_dtype, found)
