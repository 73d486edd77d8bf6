"""All-to-all of slices of an array through a codec."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives import (
  _arguments,
  _reduce_scatter,
  _rows,
  _state,
  _straight_through,
  _transport,
)
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike


def all_to_all_init(
  x: ShapedLike,
  axis_name: AxisName,
  codec: codecs.Codec,
  *,
  split_axis: int = 0,
) -> PyTree:
  """Returns the codec state for `all_to_all` of an array like `x`.

  Args:
    x: array or ShapeDtypeStruct of this worker's array.
    axis_name: the workers' axis, bound here.
    codec: codec that `all_to_all` will be given.
    split_axis: position of the axis that is split.

  Returns:
    This worker's state, typed as varying.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.feedback(codecs.uniform(bits=8))
    >>> def run(x):
    ...   state = all_to_all_init(x, "data", codec)
    ...   return all_to_all(x, "data", codec, state=state)[0]
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   run, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")
    ... )
    >>> jax.eval_shape(f, jnp.ones(4)).shape
    (4,)
  """
  _rows.check_rows("split_axis", x, split_axis, axis_name)
  return _reduce_scatter.reduce_scatter_init(
    x, axis_name, codec, axis=split_axis
  )


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
    state: what `all_to_all_init` or the last call returned.
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
  check_codec("codec", codec, one_round=True)
  if backward is not None:
    check_codec("backward", backward, stateless=True, one_round=True)
  _arguments.check_shaped("x", x)
  core.check_float("x", x)
  _arguments.check_key(key)
  workers = _arguments.count_workers(axis_name)
  split_axis = _rows.check_rows("split_axis", x, split_axis, axis_name)
  concat_axis = _arguments.check_position("concat_axis", concat_axis, x.ndim)
  expected = jax.eval_shape(
    lambda: all_to_all_init(x, axis_name, codec, split_axis=split_axis)
  )
  state = _state.check_state(expected, state)
  own = _rows.to_encode_dtype(
    codec, core.to_varying(lax.stop_gradient(x), axis_name)
  )
  rows = _rows.to_rows(own, split_axis, workers)
  payload, state = _rows.encode_rows(codec, rows, state, key)
  received = _transport.exchange_rows(payload, axis_name)
  slices = jax.vmap(lambda p: codec.decode(p, rows[0]))(received)
  y = core.saturate_cast(
    jnp.concatenate(list(slices), axis=concat_axis), x.dtype
  )

  def reference_op(x: Array) -> Array:
    return lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)

  def send_back(ct: Array, key: core.Key | None) -> Array:
    # Another key than that of the forward pass.
    own = None if key is None else key.fold(workers)
    back, _ = all_to_all(
      ct,
      axis_name,
      backward,
      key=own,
      split_axis=concat_axis,
      concat_axis=split_axis,
    )
    return back

  x = core.to_varying(x, axis_name)
  if backward is None:
    return _straight_through.straight_through(reference_op, x, y), state
  return _straight_through.with_gradient(
    send_back, x, y, core.to_varying(key, axis_name)
  ), state
