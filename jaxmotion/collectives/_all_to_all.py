"""All-to-all of slices of an array through a codec."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs import Codec, identity
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives._arguments import (
  check_key,
  check_position,
  check_shaped,
  count_workers,
)
from jaxmotion.collectives._reduce_scatter import reduce_scatter_init
from jaxmotion.collectives._rows import (
  check_rows,
  encode_rows,
  to_encode_dtype,
  to_rows,
)
from jaxmotion.collectives._state import check_state
from jaxmotion.collectives._straight_through import (
  straight_through,
  with_gradient,
)
from jaxmotion.collectives._transport import exchange_rows
from jaxmotion.core import (
  Array,
  AxisName,
  Key,
  PyTree,
  ShapedLike,
  check_float,
  saturate_cast,
  to_varying,
)


def all_to_all_init(
  x: ShapedLike, axis_name: AxisName, codec: Codec, *, split_axis: int = 0
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
  check_rows("split_axis", x, split_axis, axis_name)
  return reduce_scatter_init(x, axis_name, codec, axis=split_axis)


def all_to_all(
  x: Array,
  axis_name: AxisName,
  codec: Codec | None = None,
  *,
  backward: Codec | None = None,
  state: PyTree | None = None,
  key: Key | None = None,
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
  codec = identity() if codec is None else codec
  check_codec("codec", codec, one_round=True)
  if backward is not None:
    check_codec("backward", backward, stateless=True, one_round=True)
  check_shaped("x", x)
  check_float("x", x)
  check_key(key)
  workers = count_workers(axis_name)
  split_axis = check_rows("split_axis", x, split_axis, axis_name)
  concat_axis = check_position("concat_axis", concat_axis, x.ndim)
  expected = jax.eval_shape(
    lambda: all_to_all_init(x, axis_name, codec, split_axis=split_axis)
  )
  state = check_state(expected, state)
  own = to_encode_dtype(codec, to_varying(lax.stop_gradient(x), axis_name))
  rows = to_rows(own, split_axis, workers)
  payload, state = encode_rows(codec, rows, state, key)
  received = exchange_rows(payload, axis_name)
  slices = jax.vmap(lambda p: codec.decode(p, rows[0]))(received)
  y = saturate_cast(jnp.concatenate(list(slices), axis=concat_axis), x.dtype)

  def reference_op(x: Array) -> Array:
    return lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)

  def send_back(ct: Array, key: Key | None) -> Array:
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

  x = to_varying(x, axis_name)
  if backward is None:
    return straight_through(reference_op, x, y), state
  return with_gradient(send_back, x, y, to_varying(key, axis_name)), state
