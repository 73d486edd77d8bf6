"""All-gather of sharded weights, whose gradient is a reduce-scatter."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxmotion.codecs import Codec, identity
from jaxmotion.codecs.extend import check_codec
from jaxmotion.collectives._arguments import (
  check_key,
  check_position,
  check_shaped,
  count_workers,
)
from jaxmotion.collectives._rows import encode_rows, to_encode_dtype, to_rows
from jaxmotion.collectives._shards import LeafCodec, average_rows
from jaxmotion.collectives._transport import gather_payloads
from jaxmotion.core import (
  Array,
  AxisName,
  Key,
  check_float,
  shape_string,
  to_varying,
)

PACKED_WEIGHTS = "jaxmotion/packed"
"""Name of gathered words, for `jax.checkpoint_policies`."""


def unshard(
  x: Array,
  axis_name: AxisName,
  weight_codec: Codec | None = None,
  gradient_codec: Codec | None = None,
  *,
  axis: int = 0,
  error: Array | None = None,
  key: Key | None = None,
) -> Array:
  r"""Gathers sharded weights through a codec; reduces their gradient likewise.

  Forward, every worker decodes the payloads of all parts. Backward, each
  worker encodes its own gradient part by part and gets the mean of its part:

  .. math::
    w = gather_r \; decode(encode(x_r)), \qquad
    \bar x_r = \frac{1}{N} \sum_s decode(encode(\bar w_{s,r} + e_{s,r}))

  Under `jax.checkpoint` the backward pass gathers again instead of saving the
  weights. A policy that saves the name `collectives.extend.PACKED_WEIGHTS`
  saves the gathered words instead.

  Args:
    x: this worker's part of the weights, floating-point.
    axis_name: the workers' axis.
    weight_codec: codec of a part, without state; None is full precision.
    gradient_codec: codec of a part's gradient, without state; None is full
      precision.
    axis: position of the axis along which the parts are joined.
    error: error memory of the gradient, float32 of the whole weights' shape,
      this worker's own. Its own "gradient" is the CHANGE of the memory: add it.
      Weights that are used twice, or never, are right that way.
    key: randomness for codecs that need it; the same in both passes.

  Returns:
    The whole weights, of the dtype of `x`, with the same bits on all workers
    but typed as varying: JAX would otherwise sum the gradient before any codec
    saw it.

  Raises:
    ValueError: an unbound axis, a codec with state, an `error` of another
      shape.
    TypeError: `x` or `error` is not floating-point.

  Example:
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    >>> def loss(part, batch):
    ...   return jnp.mean(batch @ unshard(part, "data"))
    >>> grad = jax.shard_map(
    ...   jax.grad(loss), mesh=mesh,
    ...   in_specs=(jax.P("data"), jax.P("data")), out_specs=jax.P("data"),
    ... )
    >>> jax.jit(grad)(jnp.ones(3), jnp.ones((4, 3))).tolist()
    [1.0, 1.0, 1.0]
  """
  check_shaped("x", x)
  check_float("x", x)
  workers = count_workers(axis_name)
  axis = check_position("axis", axis, x.ndim)
  codecs = {"weight_codec": weight_codec, "gradient_codec": gradient_codec}
  for name, codec in codecs.items():
    if codec is not None:
      check_codec(name, codec, stateless=True)
  check_key(key)
  whole = list(x.shape)
  whole[axis] *= workers
  if error is not None:
    check_shaped("error", error)
    check_float("error", error)
    if error.shape != tuple(whole):
      raise ValueError(
        f"`error` must have the shape {tuple(whole)} of the whole weights, got "
        f"{shape_string(error)}."
      )
  how = _How(
    axis_name,
    identity() if weight_codec is None else weight_codec,
    identity() if gradient_codec is None else gradient_codec,
    axis,
    workers,
  )
  return _unshard(how, *to_varying((x, error, key), axis_name))


class _How(NamedTuple):
  """Everything about an `unshard` but its arrays."""

  axis_name: AxisName
  weight_codec: Codec
  gradient_codec: Codec
  axis: int
  workers: int

  def gather(self, part: Array, key: Key | None) -> Array:
    """Returns the whole weights."""
    codec = self.weight_codec
    own = to_encode_dtype(codec, part)
    payload, _ = codec.encode(own, (), key)
    words = gather_payloads([payload], self.axis_name)
    words = to_varying(words, self.axis_name)
    (words,) = jax.tree.map(lambda a: checkpoint_name(a, PACKED_WEIGHTS), words)
    rows = jax.vmap(lambda p: codec.decode(p, own))(words)
    whole = jnp.concatenate(list(rows), axis=self.axis)
    return whole.astype(part.dtype)

  def reduce(
    self, ct: Array, error: Array | None, key: Key | None
  ) -> tuple[Array, Array | None]:
    """Returns this worker's part of the mean, and the memory's change."""
    codec = self.gradient_codec
    wide = to_encode_dtype(codec, ct)
    if error is not None:
      wide = ct.astype(jnp.float32)
    rows = to_rows(wide, self.axis, self.workers)
    value = rows
    if error is not None:
      value = rows + to_rows(error.astype(jnp.float32), self.axis, self.workers)
    # Another key than that of the weights.
    own = None if key is None else key.fold(self.workers)
    payload, _ = encode_rows(codec, value, (), own)
    row = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
    (mean,) = average_rows(
      [payload], [LeafCodec(codec, None)], [row], self.axis_name
    )
    if error is None:
      return mean.astype(ct.dtype), None
    sent = jax.vmap(lambda p: codec.decode(p, row))(payload)
    # (value - sent) - error, which is what must be added to the memory.
    change = jnp.concatenate(list(rows - sent), axis=self.axis)
    return mean.astype(ct.dtype), change.astype(error.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unshard(
  how: _How, part: Array, error: Array | None, key: Key | None
) -> Array:
  del error
  return how.gather(part, key)


def _forward(
  how: _How, part: Array, error: Array | None, key: Key | None
) -> tuple[Array, Any]:
  return how.gather(part, key), (error, key)


def _backward(how: _How, kept: Any, ct: Array) -> tuple[Any, Any, Any]:
  error, key = kept
  mean, change = how.reduce(ct, error, key)
  zeros = jax.tree.map(lambda k: np.zeros(k.shape, jax.dtypes.float0), key)
  return mean, change, zeros


_unshard.defvjp(_forward, _backward)
