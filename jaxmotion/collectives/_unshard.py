"""All-gather of sharded weights, whose gradient is a reduce-scatter."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxmotion import core
from jaxmotion.codecs import Codec, identity
from jaxmotion.collectives import _arguments, _layout, _rounds
from jaxmotion.core import Array, AxisName, PyTree

PACKED_WEIGHTS = "jaxmotion/packed"
"""Name of gathered words, for `jax.checkpoint_policies`."""

HOST_WEIGHTS = "jaxmotion/host"
"""Name of a device's words of all hosts, for `jax.checkpoint_policies`."""


@core.declare(
  x=core.float_array,
  axis_name=_arguments.check_axes,
  weight_codec=_arguments.stateless,
  gradient_codec=_arguments.stateless,
  error=core.optional(core.float_array),
  key=core.optional_key,
  local_codec=_arguments.stateless,
  spec=core.optional(core.instance(PartitionSpec, "a PartitionSpec or None")),
)
def unshard(
  x: Array,
  axis_name: AxisName,
  weight_codec: Codec | None = None,
  gradient_codec: Codec | None = None,
  *,
  axis: int = 0,
  error: Array | None = None,
  key: core.Key | None = None,
  local_codec: Codec | None = None,
  spec: PartitionSpec | None = None,
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

  With `HostAxes` payloads travel between hosts first, and devices of a host
  then forward the words. A policy that saves the name
  `collectives.extend.HOST_WEIGHTS` saves what a device got from other hosts.
  The backward pass then gathers within a host alone (hpZ). The gradient is
  averaged within the host first, and its mean is encoded for other hosts.

  Args:
    x: this worker's part of the weights, floating-point.
    axis_name: the workers' axis, or `HostAxes`. Parts are ordered host by host.
    weight_codec: codec of a part, without state; None is full precision.
    gradient_codec: codec of a part's gradient, without state; None is full
      precision.
    axis: position of the axis along which the parts are joined.
    error: error memory of the gradient, float32 of the whole weights' shape,
      this worker's own. Its own "gradient" is the CHANGE of the memory: add it.
      Weights that are used twice, or never, are right that way. With
      `HostAxes` it has the shape of `x` with `axis` times the hosts.
    key: randomness for codecs that need it; the same in both passes.
    local_codec: codec of gradients within a host, without state; None is full
      precision.
    spec: how `x` is sharded over axes of the mesh that are the model's and not
      manual here (tensor parallelism): each device sends its own shard. None:
      it is not.

  Returns:
    The whole weights, of the dtype of `x`. Their bits are the same on all
    workers, but their type is varying: JAX would otherwise sum the gradient
    before any codec saw it.

  Raises:
    ValueError: an axis is unbound. A codec has state, or `error` has another
      shape. `local_codec` is given without hosts, or `spec` shards `axis`.
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
  _arguments.check_local_codec(axis_name, local_codec)
  core.axis_size(axis_name)
  rows = core.axis_size(core.split_axes(axis_name)[0])
  axis = _arguments.check_position("axis", axis, x.ndim)
  given = weight_codec, gradient_codec, local_codec
  codecs = [identity() if codec is None else codec for codec in given]
  remembered = list(x.shape)
  remembered[axis] *= rows
  if error is not None and error.shape != tuple(remembered):
    raise ValueError(
      f"`error` must have the shape {tuple(remembered)} of the weights that "
      f"this worker sends, got {core.shape_string(error)}."
    )
  if spec is not None:
    if len(spec) > x.ndim or (len(spec) > axis and spec[axis] is not None):
      raise ValueError(
        f"`spec` must shard other axes than {axis}, which workers cut, of "
        f"{x.ndim} axes, got {spec}: its rows would be in another order."
      )
    spec = spec if any(entry is not None for entry in spec) else None
  one = _Gather(axis_name, axis, spec, *codecs)

  def gather(part: Array, key: core.Key | None) -> Array:
    return one.map_model(one.gather_shard, (spec, jax.P()), spec)(part, key)

  @jax.custom_vjp
  def run(part: Array, error: Array | None, key: core.Key | None) -> Array:
    return gather(part, key)

  def forward(part: Array, *kept: Any) -> tuple[Array, Any]:
    return gather(part, kept[1]), kept

  def backward(kept: Any, ct: Array) -> tuple[Any, Any, Any]:
    specs = spec, spec
    reduce = one.map_model(one.reduce_shard, (*specs, jax.P()), specs)
    zeros = jax.custom_derivatives.zero_from_primal(kept[1])
    return *reduce(ct, *kept), zeros

  run.defvjp(forward, backward)
  return run(*core.to_varying((x, error, key), axis_name))


class _Gather(NamedTuple):
  """Arguments of an `unshard` but its arrays; gathers and reduces one shard."""

  axis_name: AxisName
  axis: int
  spec: PartitionSpec | None
  weight_codec: Codec
  gradient_codec: Codec
  local_codec: Codec

  def map_model(
    self, fun: Callable[..., Any], in_specs: Any, out_specs: Any
  ) -> Callable[..., Any]:
    """Maps a function over the shards of a model, which are encoded alone."""
    free = core.find_free_axes()
    if self.spec is None or not free:
      return fun
    return jax.shard_map(
      fun,
      in_specs=in_specs,
      out_specs=out_specs,
      axis_names=set(free),
      check_vma=core.tracks_varying(core.axis_names(self.axis_name)),
    )

  def gather_shard(self, part: Array, key: core.Key | None) -> Array:
    """Gathers the parts of all workers through the codec of weights."""
    (rows,) = _rounds.gather_shards(
      [part],
      [_rounds.LeafCodec(self.weight_codec, key)],
      self.axis_name,
      mark=self._name_words,
    )
    return jnp.concatenate(list(rows), axis=self.axis).astype(part.dtype)

  def _name_words(self, words: PyTree, axis_name: AxisName) -> PyTree:
    """Names the words that were gathered along an axis, for policies."""
    senders, devices = core.split_axes(self.axis_name)
    between_hosts = devices and axis_name == senders
    name = HOST_WEIGHTS if between_hosts else PACKED_WEIGHTS
    words = core.to_varying(words, self.axis_name)
    return jax.tree.map(lambda a: checkpoint_name(a, name), words)

  def reduce_shard(
    self, ct: Array, error: Array | None, key: core.Key | None
  ) -> tuple[Array, Array | None]:
    """Returns this worker's part of the mean, and the memory's change."""
    codec = self.gradient_codec
    wide = _layout.to_encode_dtype(codec, ct)
    if error is not None:
      wide = ct.astype(jnp.float32)
    workers = core.axis_size(self.axis_name)
    rows = _layout.to_rows(wide, self.axis, workers)
    # Another key than that of the weights.
    own = None if key is None else key.fold(workers)
    if isinstance(self.axis_name, core.HostAxes):
      local = _rounds.LeafCodec(
        self.local_codec, None if own is None else own.fold(0)
      )
      (rows,) = _rounds.average_locally([rows], [local], self.axis_name)
      rows = _layout.to_encode_dtype(codec, rows)
      own = None if own is None else own.fold(1)
    value = rows
    if error is not None:
      wide = error.astype(jnp.float32)
      value = rows + _layout.to_rows(wide, self.axis, len(rows))
    row = jax.ShapeDtypeStruct(rows.shape[1:], rows.dtype)
    kind = _rounds.choose_kind(codec, row)
    senders, _ = core.split_axes(self.axis_name)
    rounds = _rounds.sum_rows(codec, value, row, (), own, kind)
    total, payload, _ = _rounds.run_one(rounds, kind, senders)
    mean = (total / len(rows)).astype(ct.dtype)
    if error is None:
      return mean, None
    sent = jax.vmap(lambda p: codec.decode(p, row))(payload)
    # (value - sent) - error, which is what must be added to the memory.
    change = jnp.concatenate(list(rows - sent), axis=self.axis)
    return mean, change.astype(error.dtype)
