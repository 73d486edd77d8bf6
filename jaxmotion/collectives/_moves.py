"""Moves of arrays between workers through a codec.

Each checks its arguments, encodes, sends payloads in one buffer, and decodes.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmotion import codecs, core, hosts
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives import (
  _arguments,
  _layout,
  _rounds,
  _states,
  _transport,
)
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike

# (source, destination) of each transfer.
Pairs = tuple[tuple[int, int], ...]
_ONE_ROUND = functools.partial(check_codec, one_round=True)
# What moves of arrays are given alike.
_INPUTS = dict(
  x=core.float_array,
  axis_name=core.mesh_axes,
  codec=core.optional(_ONE_ROUND),
  key=core.optional_key,
)


@core.declare(x=core.float_array, axis_name=core.mesh_axes, codec=_ONE_ROUND)
def all_gather_init(
  x: ShapedLike, axis_name: AxisName, codec: codecs.Codec
) -> PyTree:
  """Returns the codec state for `all_gather` of an array like `x`.

  Args:
    x: array or ShapeDtypeStruct of this worker's array.
    axis_name: the workers' axis, bound here.
    codec: codec that `all_gather` will be given.

  Returns:
    This worker's state, typed as varying.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.feedback(codecs.uniform(bits=8))
    >>> def run(x):
    ...   state = all_gather_init(x, "data", codec)
    ...   return all_gather(x, "data", codec, state=state)[0]
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   run, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()
    ... )
    >>> jax.eval_shape(f, jnp.ones(4)).shape
    (1, 4)
  """
  core.axis_size(axis_name)  # Raises unless it is bound.
  return core.to_varying(codec.init(x), axis_name)


@core.declare(**_INPUTS, tiled=core.boolean)
def all_gather(
  x: Array,
  axis_name: AxisName,
  codec: codecs.Codec | None = None,
  *,
  state: PyTree | None = None,
  key: core.Key | None = None,
  axis: int = 0,
  tiled: bool = False,
  sending: hosts.Sending | None = None,
) -> tuple[Array, PyTree]:
  """Gathers every worker's array through a codec.

  The result has the same bits on every worker, the sender included: all decode
  the same payloads. The gradient is that of `lax.all_gather`.

  Args:
    x: floating-point array, this worker's own.
    axis_name: the workers' axis.
    codec: codec of the array; None is `identity()`.
    state: what `all_gather_init` or the last call returned.
    key: randomness for codecs that need it.
    axis: position of the workers' axis in the result, or (tiled) the axis to
      concatenate along.
    tiled: whether to concatenate along `axis` instead of stacking.
    sending: how a step of several programs sends, as for `all_reduce`.

  Returns:
    The gathered array and the new state.

  Raises:
    ValueError: an unbound axis, a wrong state.

  Example:
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   lambda x: all_gather(x, "data", tiled=True)[0],
    ...   mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(),
    ... )
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [0.0, 1.0, 2.0, 3.0]
  """
  codec = codecs.identity() if codec is None else codec
  axis = _arguments.check_position("axis", axis, x.ndim + (not tiled))
  expected = jax.eval_shape(lambda: all_gather_init(x, axis_name, codec))
  state = _arguments.check_state(expected, state)
  x = core.to_varying(x, axis_name)
  rounds = _rounds.gather_array(codec, lax.stop_gradient(x), state, key)
  sending = hosts.check_sending(sending)
  rows, state = _rounds.run_one(rounds, "gather", axis_name, sending)
  join = jnp.concatenate if tiled else jnp.stack
  y = join(list(core.saturate_cast(rows, x.dtype)), axis=axis)
  reference_op = functools.partial(
    core.gather_replicated, axis_name=axis_name, axis=axis, tiled=tiled
  )
  return _arguments.straight_through(reference_op, x, y), state


@core.declare(x=core.float_array, axis_name=core.mesh_axes, codec=_ONE_ROUND)
def reduce_scatter_init(
  x: ShapedLike, axis_name: AxisName, codec: codecs.Codec, *, axis: int = 0
) -> PyTree:
  """Returns the codec state for `reduce_scatter`, or `all_to_all`, of an `x`.

  Args:
    x: array or ShapeDtypeStruct of this worker's array.
    axis_name: the workers' axis, bound here.
    codec: codec that the collective will be given.
    axis: position of the axis that is split.

  Returns:
    This worker's state, typed as varying.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.feedback(codecs.uniform(bits=8))
    >>> def run(x):
    ...   state = reduce_scatter_init(x, "data", codec)
    ...   return reduce_scatter(x, "data", codec, state=state)[0]
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   run, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
    ... )
    >>> jax.eval_shape(f, jnp.ones(4)).shape
    (4,)
  """
  workers, axis = _check_rows("axis", x, axis, axis_name)
  shape = list(x.shape)
  shape[axis] //= workers
  row = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
  return core.to_varying(_states.init_rows(codec, workers, row), axis_name)


@core.declare(**_INPUTS, op=core.choice(("sum", "mean")))
def reduce_scatter(
  x: Array,
  axis_name: AxisName,
  codec: codecs.Codec | None = None,
  *,
  state: PyTree | None = None,
  key: core.Key | None = None,
  op: str = "sum",
  axis: int = 0,
) -> tuple[Array, PyTree]:
  """Returns this worker's shard of the sum (or with `op="mean"` the mean).

  Every worker sends every other one the payload of its shard. Shards are
  decoded and added in float32. The gradient is that of `lax.psum_scatter`.

  Args:
    x: floating-point array, this worker's own.
    axis_name: the workers' axis.
    codec: codec of each shard; None is `identity()`.
    state: what `reduce_scatter_init` or the last call returned.
    key: randomness for codecs that need it.
    op: "sum" or "mean" over workers.
    axis: position of the axis that is split; the workers must divide its
      length.

  Returns:
    Worker r's shard, of `x`'s shape with the length of `axis` divided by the
    workers, and the new state.

  Raises:
    ValueError: an unbound axis, an axis that workers do not divide, a wrong
      state.

  Example:
    >>> import jax.numpy as jnp
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   lambda x: reduce_scatter(x, "data")[0],
    ...   mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data"),
    ... )
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [0.0, 1.0, 2.0, 3.0]
  """
  codec = codecs.identity() if codec is None else codec
  workers, axis = _check_rows("axis", x, axis, axis_name)
  expected = jax.eval_shape(
    lambda: reduce_scatter_init(x, axis_name, codec, axis=axis)
  )
  state = _arguments.check_state(expected, state)
  x = core.to_varying(x, axis_name)
  rows = _split_rows(x, codec, axis, workers)
  row = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
  kind = "scatter" if _layout.is_summed(codec, x) else "all_to_all"
  rounds = _rounds.sum_rows(codec, rows, row, state, key, kind)
  total, _, state = _rounds.run_one(rounds, kind, axis_name)

  def reference_op(x: Array) -> Array:
    y = lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)
    return y / workers if op == "mean" else y

  y = core.saturate_cast(total / workers if op == "mean" else total, x.dtype)
  return _arguments.straight_through(reference_op, x, y), state


@core.declare(**_INPUTS, backward=_arguments.stateless)
def all_to_all(
  x: Array,
  axis_name: AxisName,
  codec: codecs.Codec | None = None,
  *,
  backward: codecs.Codec | None = None,
  state: PyTree | None = None,
  key: core.Key | None = None,
  split_axis: int = 0,
  concat_axis: int = 0,
) -> tuple[Array, PyTree]:
  """Sends slice r of each worker's array to worker r, through a codec.

  It computes the tiled `lax.all_to_all`, with its gradient. Each slice is
  encoded by itself, also the one that a worker keeps. Experts exchange their
  tokens so: blocks of a model's width give each token a scale of its own.

  Args:
    x: floating-point array, this worker's own.
    axis_name: the workers' axis.
    codec: codec of each slice; None is `identity()`.
    backward: codec of each slice of the gradient, which travels back, without
      state; None sends it at full precision.
    state: what `reduce_scatter_init`, with `split_axis` as its `axis`, or the
      last call returned.
    key: randomness for codecs that need it; the same in both passes.
    split_axis: position of the axis that is split; the workers must divide its
      length.
    concat_axis: position of the axis along which received slices are joined.

  Returns:
    The joined slices, in the order of their senders, and the new state.

  Raises:
    ValueError: an unbound axis, an axis that workers do not divide, a wrong
      state.

  Example:
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   lambda x: all_to_all(x, "data")[0],
    ...   mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"),
    ... )
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [0.0, 1.0, 2.0, 3.0]
  """
  codec = codecs.identity() if codec is None else codec
  workers, split_axis = _check_rows("split_axis", x, split_axis, axis_name)
  concat_axis = _arguments.check_position("concat_axis", concat_axis, x.ndim)
  expected = jax.eval_shape(
    lambda: reduce_scatter_init(x, axis_name, codec, axis=split_axis)
  )
  state = _arguments.check_state(expected, state)
  x = core.to_varying(x, axis_name)
  rows = _split_rows(x, codec, split_axis, workers)
  rounds = _rounds.exchange_rows(codec, rows, state, key)
  slices, state = _rounds.run_one(rounds, "all_to_all", axis_name)
  y = core.saturate_cast(
    jnp.concatenate(list(slices), axis=concat_axis), x.dtype
  )

  def reference_op(x: Array) -> Array:
    return lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)

  def send_back(ct: Array, key: core.Key | None) -> Array:
    """Returns the gradient's slices, back at the workers they came from."""
    # Another key than that of the forward pass.
    own = None if key is None else key.fold(workers)
    axes: Any = dict(split_axis=concat_axis, concat_axis=split_axis)
    return all_to_all(ct, axis_name, backward, key=own, **axes)[0]

  if backward is None:
    return _arguments.straight_through(reference_op, x, y), state
  own_key = core.to_varying(key, axis_name)
  return _arguments.with_gradient(send_back, x, y, own_key), state


@core.declare(
  x=core.float_array,
  axis_name=core.mesh_axes,
  codec=_arguments.stateless,
  backward=_arguments.stateless,
  key=core.optional_key,
)
def permute(
  x: Array,
  axis_name: AxisName,
  pairs: Sequence[tuple[int, int]],
  codec: codecs.Codec | None = None,
  *,
  backward: codecs.Codec | None = None,
  key: core.Key | None = None,
) -> Array:
  """Sends an array from one worker of each pair to the other, through a codec.

  It computes `lax.ppermute`: activations go to the next stage of a pipeline,
  and their gradients come back. Each direction has its own codec. A worker that
  is no destination gets zeros. All fields of a payload travel in one buffer.

  Args:
    x: floating-point array, this worker's own.
    axis_name: the workers' axis.
    pairs: (source, destination) of each transfer; no worker is twice a source
      or twice a destination.
    codec: codec of the array, without state; None is full precision.
    backward: codec of the gradient, which travels back, without state; None is
      full precision.
    key: randomness for codecs that need it; the same in both passes.

  Returns:
    The received array, of the dtype of `x`, typed as varying.

  Raises:
    TypeError: `x` is not floating-point.
    ValueError: an unbound axis, a codec with state, pairs that are none, that
      repeat a worker, or that name one which does not exist.

  Example:
    >>> import jax
    >>> from jaxmotion import codecs
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("stage",))
    >>> def send(x):
    ...   return permute(x, "stage", [(0, 0)], codecs.cast("bfloat16"))
    >>> f = jax.shard_map(
    ...   send, mesh=mesh, in_specs=jax.P("stage"), out_specs=jax.P("stage")
    ... )
    >>> jax.jit(f)(jnp.array([1.0, 2.0])).tolist()
    [1.0, 2.0]

  References:
    Wang et al., *Fine-tuning Language Models over Slow Networks using
    Activation Quantization with Guarantees*, 2022 (links between stages).
  """
  codec = codecs.identity() if codec is None else codec
  backward = codecs.identity() if backward is None else backward
  workers = core.axis_size(axis_name)
  forth = _check_pairs(pairs, workers)
  back = tuple((target, source) for source, target in forth)

  def send_back(ct: Array, key: core.Key | None) -> Array:
    # Another key than that of the forward pass.
    own = None if key is None else key.fold(workers)
    return _send(ct, axis_name, back, backward, own)

  x, key = core.to_varying((x, key), axis_name)
  y = _send(lax.stop_gradient(x), axis_name, forth, codec, key)
  return _arguments.with_gradient(send_back, x, y, key)


def _send(
  x: Array,
  axis_name: AxisName,
  pairs: Pairs,
  codec: codecs.Codec,
  key: core.Key | None,
) -> Array:
  """Returns the decoded array of this worker's source, zeros without one."""
  own = _layout.to_encode_dtype(codec, x)
  payload, _ = codec.encode(own, (), key)
  received = _transport.permute_payload(payload, axis_name, pairs)
  y = core.saturate_cast(codec.decode(received, own), x.dtype)
  # A payload of zeros may decode to anything.
  targets = np.array([target for _, target in pairs])
  is_target = jnp.any(core.worker_index(axis_name) == targets)
  return jnp.where(is_target, y, jnp.zeros_like(y))


def _check_pairs(pairs: Sequence[tuple[int, int]], workers: int) -> Pairs:
  """Returns pairs of workers as tuples; raises unless each is one transfer."""

  def is_pair(pair: Any) -> bool:
    return (
      isinstance(pair, list | tuple)
      and len(pair) == 2
      and all(type(w) is int and 0 <= w < workers for w in pair)
    )

  if not (
    isinstance(pairs, list | tuple)
    and pairs
    and all(map(is_pair, pairs))
    # No worker is twice a source, or twice a destination.
    and all(len(set(ends)) == len(pairs) for ends in zip(*pairs, strict=True))
  ):
    raise ValueError(
      f"`pairs` must be (source, destination) pairs of workers in [0, "
      f"{workers - 1}], each at most once a source and once a destination, got "
      f"{pairs!r}."
    )
  return tuple((source, target) for source, target in pairs)


def _check_rows(
  name: str, x: Array, axis: int, axis_name: AxisName
) -> tuple[int, int]:
  """Returns the number of workers and the non-negative axis that they cut."""
  workers = core.axis_size(axis_name)
  axis = _arguments.check_position(name, axis, len(x.shape))
  if x.shape[axis] % workers:
    raise ValueError(
      f"`{name}` must be an axis whose length {workers} workers divide, "
      f"got {axis} of {core.shape_string(x)}."
    )
  return workers, axis


def _split_rows(
  x: Array, codec: codecs.Codec, axis: int, workers: int
) -> Array:
  """Returns this worker's rows, (workers, ...), as they are encoded."""
  own = _layout.to_encode_dtype(codec, lax.stop_gradient(x))
  return _layout.to_rows(own, axis, workers)
