"""Splits layers by output channels over workers, and predicts what they send.

Channel-split (tensor) parallelism of a `Network`: worker `r` of `M` holds
`1 / M` of the output channels of each layer's parameters and computes those
channels. A layer that keeps its input channels apart (`mixes` is false: ReLU,
pooling) reads the worker's own part. A layer that reads all channels of its
inputs (a convolution, a dense layer) has them gathered first.

The costs are those of the busiest worker, which has the rounded-up share of
every layer. The other workers wait for it at the next collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmotion import codecs, core, wire
from jaxmotion.core import ShapedLike
from jaxmotion.perfmodel import cost, networks, platform
from jaxmotion.perfmodel.predict import _codecs, _collectives


class LayerSplit:
  """Shapes of one worker's part of every layer of a network.

  Indices are positions in `Network.layers`.

  Args:
    network: the network whose layers are split.
    images: number of images that each worker reads.
    parts: number of workers that share the channels; of a layer with fewer
      channels, each of the first workers has one.

  Attributes:
    params: ShapeDtypeStructs of the worker's parameters, for each layer.
    inputs: ShapeDtypeStructs of what each layer reads.
    gathered: whole outputs that workers gather before some layer reads them.
    summed: those gathered outputs whose gradient is a sum over workers.
  """

  def __init__(self, network: networks.Network, images: int, parts: int):
    self.layers = network.layers
    outputs: dict[int, ShapedLike] = dict(enumerate(network.shapes(images)))
    outputs[networks.IMAGES], outputs[networks.LABELS] = network.batch(images)
    self._parts = parts
    self.params = [
      jax.tree.map(lambda a: _channel_part(a, parts), dict(layer.params))
      for layer in self.layers
    ]
    self.inputs = [
      tuple(self._input_like(outputs[i], i, layer.mixes) for i in layer.inputs)
      for layer in self.layers
    ]
    mixing = [layer for layer in self.layers if layer.mixes]
    # Each worker computes a part of these outputs and needs the whole of them.
    read = {i for layer in mixing for i in layer.inputs if i >= 0}
    # A layer with split parameters gives each worker only its own share of
    # the gradient of the input: the gradient is a sum over workers. A layer
    # without parameters (the loss) gives the same gradient on all of them.
    summed = {i for layer in mixing if layer.params for i in layer.inputs}
    is_alone = parts == 1
    self.gathered = {} if is_alone else {i: outputs[i] for i in sorted(read)}
    self.summed = {i: like for i, like in self.gathered.items() if i in summed}

  def _input_like(
    self, like: ShapedLike, index: int, is_whole: bool
  ) -> ShapedLike:
    is_whole = is_whole or index == networks.LABELS
    return like if is_whole else _channel_part(like, self._parts)

  def layer_costs(self, index: int) -> tuple[cost.Cost, cost.Cost]:
    """Returns the cost of a layer's forward pass, and of both its passes."""
    layer = self.layers[index]
    wants_grads = tuple(i >= 0 for i in layer.inputs)
    params = tuple(sorted(self.params[index].items()))
    return _layer_costs(layer.fn, params, self.inputs[index], wants_grads)

  @property
  def residual_bytes(self) -> int:
    """Bytes of the activations that the backward pass reads again."""
    # An output that several layers read in the same shape is stored once. One
    # that is read whole and in part is stored twice.
    residuals = {
      (i, like.shape): like
      for layer, likes in zip(self.layers, self.inputs, strict=True)
      for i, like in zip(layer.inputs, likes, strict=True)
    }
    return core.tree_bytes(list(residuals.values()))


# Layers are hashable functions: a network that repeats a block, and a sweep
# over platforms with one network, trace each distinct layer once.
@functools.lru_cache(maxsize=4096)
def _layer_costs(
  fn: Callable[..., Any],
  params: tuple[tuple[str, ShapedLike], ...],
  inputs: tuple[ShapedLike, ...],
  wants_grads: tuple[bool, ...],
) -> tuple[cost.Cost, cost.Cost]:
  def both_passes(params: Any, inputs: Any, ct: Any) -> Any:
    y, vjp_fn = jax.vjp(fn, params, *inputs)
    param_grads, *grads = vjp_fn(ct)
    # Gradients of images and labels are not returned, so XLA would remove
    # what computes them: `predict_cost` does not count it either.
    wanted = [g for g, want in zip(grads, wants_grads, strict=True) if want]
    return y, param_grads, wanted

  ct = jax.eval_shape(fn, dict(params), *inputs)
  forward = cost.predict_cost(fn, dict(params), *inputs)
  return forward, cost.predict_cost(both_passes, dict(params), inputs, ct)


def _channel_part(like: ShapedLike, parts: int) -> jax.ShapeDtypeStruct:
  """Returns the largest part of an array whose last axis is split."""
  *outer, channels = like.shape
  return jax.ShapeDtypeStruct((*outer, -(-channels // parts)), like.dtype)


class TransferCost(NamedTuple):
  """Predicted seconds and bytes of moving one array over an axis."""

  encode_s: float = 0.0
  link_s: float = 0.0
  decode_s: float = 0.0
  wire_bytes: float = 0.0

  @property
  def total_s(self) -> float:
    """Seconds of encoding, transfer and decoding, one after the other."""
    return self.encode_s + self.link_s + self.decode_s


def gather_channels(
  like: ShapedLike,
  axis: platform.Axis,
  codec: codecs.Codec,
  device: platform.Device,
  algorithm: str,
) -> TransferCost:
  """Predicts an all-gather of an array of which each worker has a part."""
  # Each worker encodes its part once and decodes the parts of all workers, as
  # `collectives.all_gather` does.
  part = _channel_part(like, axis.workers)
  decode_s = axis.workers * _codecs.decode_seconds(codec, part.size, 1, device)
  return _transfer_cost(
    "all_gather", codec, part, 1, axis, device, decode_s, algorithm
  )


def reduce_scatter_channels(
  like: ShapedLike,
  axis: platform.Axis,
  codec: codecs.Codec,
  device: platform.Device,
  algorithm: str,
) -> TransferCost:
  """Predicts a reduce-scatter of an array that each worker has as a whole."""
  # As in `collectives.reduce_scatter`, encoded parts cannot be added on the
  # way: an all-to-all brings them to their owner, which decodes and sums them.
  part = _channel_part(like, axis.workers)
  if codec == codecs.identity():
    op, decode_s = "reduce_scatter", 0.0
  else:
    op = "all_to_all"
    decode_s = _codecs.decode_seconds(codec, part.size, axis.workers, device)
  rows = axis.workers
  return _transfer_cost(
    op, codec, part, rows, axis, device, decode_s, algorithm
  )


def _transfer_cost(
  op: str,
  codec: codecs.Codec,
  part: ShapedLike,
  rows: int,
  axis: platform.Axis,
  device: platform.Device,
  decode_s: float,
  algorithm: str,
) -> TransferCost:
  """Predicts a collective of `rows` encoded parts on each worker."""
  nbytes = rows * wire.payload_bytes(codec, part)
  # All-to-alls are done by the ring algorithm alone.
  options = {"algorithm": algorithm if op != "all_to_all" else "ring"}
  return TransferCost(
    _codecs.encode_seconds(codec, rows * part.size, device),
    _collectives.collective_seconds(
      op, nbytes, axis.workers, axis.link, **options
    ),
    decode_s,
    _collectives.collective_traffic(
      op, nbytes, axis.workers, **options
    ).wire_bytes,
  )
