"""All-gather of every worker's array through a codec."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import codecs, core
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives import (
  _arguments,
  _rows,
  _state,
  _straight_through,
  _transport,
)
from jaxmotion.core import Array, AxisName, PyTree, ShapedLike


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
  _arguments.check_shaped("x", x)
  _arguments.count_workers(axis_name)
  check_codec("codec", codec, one_round=True)
  return core.to_varying(codec.init(x), axis_name)


def all_gather(
  x: Array,
  axis_name: AxisName,
  codec: codecs.Codec | None = None,
  *,
  state: PyTree | None = None,
  key: core.Key | None = None,
  axis: int = 0,
  tiled: bool = False,
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
  check_codec("codec", codec, one_round=True)
  _arguments.check_shaped("x", x)
  core.check_float("x", x)
  _arguments.check_key(key)
  core.check_bool("tiled", tiled)
  axis = _arguments.check_position("axis", axis, x.ndim + (not tiled))
  expected = jax.eval_shape(lambda: all_gather_init(x, axis_name, codec))
  state = _state.check_state(expected, state)
  own = _rows.to_encode_dtype(
    codec, core.to_varying(lax.stop_gradient(x), axis_name)
  )
  payload, state = codec.encode(own, state, key)
  (payloads,) = _transport.gather_payloads([payload], axis_name)
  decoded = jax.vmap(lambda p: codec.decode(p, own))(payloads)
  join = jnp.concatenate if tiled else jnp.stack

  def reference_op(x: Array) -> Array:
    return core.gather_replicated(x, axis_name, axis, tiled=tiled)

  y = join(list(core.saturate_cast(decoded, x.dtype)), axis=axis)
  return _straight_through.straight_through(
    reference_op, core.to_varying(x, axis_name), y
  ), state
