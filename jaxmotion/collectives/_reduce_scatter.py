"""Compressed reduce-scatter."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.codecs import Codec, identity
from jaxmotion.collectives._shared import (
  check_rows,
  check_state,
  codec_for_array,
  encode_rows,
  init_rows,
  straight_through,
  to_rows,
  widen,
)
from jaxmotion.collectives._transport import exchange_rows
from jaxmotion.core import (
  Array,
  AxisName,
  Key,
  PyTree,
  ShapedLike,
  axis_size,
  check_choice,
  check_float,
  to_varying,
  worker_index,
)


def reduce_scatter_init(
  x: ShapedLike, axis_name: AxisName, codec: Codec, *, axis: int = 0
) -> PyTree:
  """Returns the codec state for `reduce_scatter` of an array like `x`.

  Args:
    x: array or ShapeDtypeStruct of what is exchanged.
    axis_name: the workers' axis, bound here.
    codec: encodes each share.
    axis: the axis that is cut.

  Returns:
    This worker's state, typed as varying.
  """
  workers = axis_size(axis_name)
  axis = check_rows("axis", x, axis, axis_name)
  shape = list(x.shape)
  shape[axis] //= workers
  row = jax.ShapeDtypeStruct(tuple(shape), x.dtype)
  return to_varying(init_rows(codec_for_array(codec), workers, row), axis_name)


def reduce_scatter(
  x: Array,
  axis_name: AxisName,
  codec: Codec | None = None,
  *,
  state: PyTree | None = None,
  key: Key | None = None,
  op: str = "sum",
  axis: int = 0,
) -> tuple[Array, PyTree]:
  """Reduces over workers and leaves each with its share of the result.

  Every worker sends each other one the payload of its share; shares are
  decoded and added in float32. The gradient is that of `lax.psum_scatter`.

  Args:
    x: floating-point array, this worker's own.
    axis_name: the workers' axis.
    codec: encodes each share; None is `identity()`.
    state: what `reduce_scatter_init` or the last call returned.
    key: randomness for codecs that need it.
    op: "sum" or "mean".
    axis: the axis that is cut; the workers must divide its length.

  Returns:
    Worker r's share, `x`'s shape with `axis` divided by the workers, and the
    new state.

  Raises:
    ValueError: an unbound axis, an axis that cannot be cut, a wrong state.

  Example:
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> f = jax.shard_map(
    ...   lambda x: reduce_scatter(x, "data")[0],
    ...   mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data"),
    ... )
    >>> jax.jit(f)(jnp.arange(4.0)).tolist()
    [0.0, 1.0, 2.0, 3.0]
  """
  codec = codec_for_array(identity() if codec is None else codec)
  check_choice("op", op, ("sum", "mean"))
  check_float("x", x)
  workers = axis_size(axis_name)
  axis = check_rows("axis", x, axis, axis_name)
  expected = jax.eval_shape(
    lambda: reduce_scatter_init(x, axis_name, codec, axis=axis)
  )
  state = check_state(expected, state)
  own = widen(codec, to_varying(lax.stop_gradient(x), axis_name))
  rows = to_rows(own, axis, workers)
  payload, state = encode_rows(codec, rows, state, key)
  if codec.summable:
    y = codec.decode(_scatter_payload(payload, axis_name), rows[0])
  else:
    y = codec.sum_decoded(exchange_rows(payload, axis_name), rows[0])

  def stock(x: Array) -> Array:
    y = lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)
    return y / workers if op == "mean" else y

  y = (y / workers if op == "mean" else y).astype(x.dtype)
  return straight_through(stock, to_varying(x, axis_name), y), state


def _scatter_payload(payload: PyTree, axis_name: AxisName) -> PyTree:
  """Adds a summable payload's rows over workers; each keeps its own row."""
  index = worker_index(axis_name)

  def scatter(a: Array) -> Array:
    if jnp.issubdtype(a.dtype, jnp.floating):
      return lax.psum_scatter(a, axis_name, scatter_dimension=0, tiled=False)
    return lax.dynamic_index_in_dim(a, index, 0, keepdims=False)

  return jax.tree.map(scatter, payload)
