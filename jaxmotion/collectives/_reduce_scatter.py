"""Reduce-scatter of an array through a codec."""

import jax
from jax import lax

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives import (
  _arguments,
  _layout,
  _rows,
  _state,
  _straight_through,
  _sum_payloads,
  _transport,
)
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike


def reduce_scatter_init(
  x: ShapedLike, axis_name: AxisName, codec: codecs.Codec, *, axis: int = 0
) -> PyTree:
  """Returns the codec state for `reduce_scatter` of an array like `x`.

  Args:
    x: array or ShapeDtypeStruct of this worker's array.
    axis_name: the workers' axis, bound here.
    codec: codec that `reduce_scatter` will be given.
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
  workers = _arguments.count_workers(axis_name)
  axis = _rows.check_rows("axis", x, axis, axis_name)
  shape = list(x.shape)
  shape[axis] //= workers
  row = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
  check_codec("codec", codec, one_round=True)
  return core.to_varying(_state.init_rows(codec, workers, row), axis_name)


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
  check_codec("codec", codec, one_round=True)
  core.check_choice("op", op, ("sum", "mean"))
  _arguments.check_shaped("x", x)
  core.check_float("x", x)
  _arguments.check_key(key)
  workers = _arguments.count_workers(axis_name)
  axis = _rows.check_rows("axis", x, axis, axis_name)
  expected = jax.eval_shape(
    lambda: reduce_scatter_init(x, axis_name, codec, axis=axis)
  )
  state = _state.check_state(expected, state)
  own = _rows.to_encode_dtype(
    codec, core.to_varying(lax.stop_gradient(x), axis_name)
  )
  rows = _rows.to_rows(own, axis, workers)
  payload, state = _rows.encode_rows(codec, rows, state, key)
  if _layout.is_summed(codec, x):
    y = codec.decode(_sum_payloads.scatter_payload(payload, axis_name), rows[0])
  else:
    y = codec.sum_decoded(_transport.exchange_rows(payload, axis_name), rows[0])

  def reference_op(x: Array) -> Array:
    y = lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)
    return y / workers if op == "mean" else y

  y = core.saturate_cast(y / workers if op == "mean" else y, x.dtype)
  return _straight_through.straight_through(
    reference_op, core.to_varying(x, axis_name), y
  ), state
