"""Predicts a step whose channels, batch or both are split over workers.

Channel-split (tensor) parallelism of a list of layers: worker `r` of `M` holds
`1 / M` of the output channels of each layer's parameters and computes those
channels. A layer that keeps its input channels apart (`mixes` is false: ReLU,
pooling) reads the worker's own part. A layer that reads all channels of its
inputs (a convolution, a dense layer) has them gathered first.

The timeline has two kinds of communication. Activations and their gradients
(over `model_axis`) are needed by the next layer at once: their seconds are
added to the clock and overlap with nothing. Gradients of parameters (over
`data_axis`) are needed by the update alone: they go through the same buckets
and overlap model as in `perfmodel.predict_step`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from experiments.perfmodel import reference
from jaxmotion import codecs, core, perfmodel, wire
from jaxmotion.core import ShapedLike
from jaxmotion.perfmodel import extend


def predict_split_step(
  network: reference.Network,
  batch: int,  # Images of all workers together.
  platform: perfmodel.Platform,
  *,
  data_axis: str | None = None,  # Splits the batch.
  model_axis: str | None = None,  # Splits the channels.
  codec: codecs.Codec | None = None,  # Of gradients over `data_axis`.
  # Of activations and their gradients over `model_axis`.
  activation_codec: codecs.Codec | None = None,
  # Least bytes of gradients in every bucket but the last; None is one bucket.
  bucket_bytes: int | None = None,
  overlap: bool = True,  # Of the exchange of gradients and the backward pass.
  algorithm: str = "ring",
) -> perfmodel.StepPrediction:
  """Predicts a step of SGD whose channels, batch or both are split.

  Over `model_axis`, worker `r` of `M` computes its `1 / M` of the output
  channels of every layer. The gradient of a gathered input is a sum over
  workers, of which each worker keeps its own part (a reduce-scatter). All
  workers compute the loss, which has no parameters.

  Over `data_axis`, each group of `M` workers has its part of the batch. One
  axis alone is channel-split model parallelism or data parallelism.

  A layer with fewer channels than workers leaves some of them idle; the
  prediction is that of the busiest worker, for which the others wait. Layers
  are costed one by one, so nothing fuses across them.

  Raises:
    ValueError: `data_axis` does not divide the batch, both axes are the same,
      or the platform has no such axis.
  """
  if data_axis is not None and data_axis == model_axis:
    raise ValueError(
      f"`model_axis` must be another axis than `data_axis`, got {model_axis!r}."
    )
  groups = platform.axis(data_axis) if data_axis else None
  sharers = platform.axis(model_axis) if model_axis else None
  if groups and batch % groups.workers:
    raise ValueError(
      f"`batch` must be a multiple of the {groups.workers} workers on "
      f"{data_axis!r}, got {batch}."
    )
  device = platform.device
  images = batch // (groups.workers if groups else 1)
  split = LayerSplit(network, images, sharers.workers if sharers else 1)
  # Transfers over `model_axis`, by the layer whose output they move.
  gathers: dict[int, TransferCost] = {}
  scatters: dict[int, TransferCost] = {}
  if sharers:
    route = _Route(
      sharers, activation_codec or codecs.identity(), device, algorithm
    )
    gathers = {i: route.gather(x) for i, x in split.gathered.items()}
    scatters = {i: route.reduce_scatter(x) for i, x in split.summed.items()}
  forward_s, backward_s = split.pass_seconds(device)

  # The forward pass and its gathers come before the first gradient. Before
  # the backward pass of a layer, the gradient of its output is summed.
  clock = math.fsum(forward_s) + math.fsum(m.total_s for m in gathers.values())
  ready_s: dict[str, dict[str, float]] = {}
  for i in reversed(range(len(backward_s))):
    clock += backward_s[i] + scatters.get(i, TransferCost()).total_s
    ready_s[network.layers[i].name] = dict.fromkeys(split.params[i], clock)
  sizes = [core.tree_bytes(params) for params in split.params]
  update_s = math.fsum(_update_seconds(n, device) for n in sizes if n)
  memory_bytes = 2 * sum(sizes) + split.residual_bytes
  if groups:
    grads = {
      layer.name: params
      for layer, params in zip(network.layers, split.params, strict=True)
    }
    step = extend.predict_timeline(
      extend.make_layout(grads, groups, codec, None, None),
      # Both are dicts of dicts with the same keys: `jax.tree.leaves` sorts
      # keys, so leaves of `ready_s` are in the order of the layout's leaves.
      jax.tree.leaves(ready_s),
      platform,
      compute_s=clock,
      update_s=update_s,
      call_s=device.call_s,
      memory_bytes=memory_bytes,
      bucket_bytes=bucket_bytes,
      overlap=overlap,
      algorithm=algorithm,
    )
  else:
    total_s = clock + update_s + device.call_s
    step = perfmodel.StepPrediction(
      clock, 0, 0, 0, update_s, device.call_s, total_s, {}, memory_bytes
    )
  # The clock has delayed the messages by the transfers of activations, so
  # `total_s` includes them already; the sums by phase do not.
  activations = [*gathers.values(), *scatters.values()]
  sent = math.fsum(m.wire_bytes for m in activations)
  return dataclasses.replace(
    step,
    compute_s=math.fsum(forward_s) + math.fsum(backward_s),
    encode_s=step.encode_s + math.fsum(m.encode_s for m in activations),
    link_s=step.link_s + math.fsum(m.link_s for m in activations),
    decode_s=step.decode_s + math.fsum(m.decode_s for m in activations),
    axis_bytes={
      **step.axis_bytes,
      **({model_axis: sent} if model_axis and sent else {}),
    },
  )


def _update_seconds(nbytes: int, device: perfmodel.Device) -> float:
  """Predicts the update of one layer: one memory-bound kernel."""
  # The kernel reads parameters and gradients and writes parameters, with one
  # FLOP for each float32 element of each pass.
  moved = 3 * nbytes
  kernel = perfmodel.Kernel("elementwise", "float32", moved / 4, moved)
  return extend.kernel_seconds(kernel, device)


class LayerSplit:
  """Shapes of the busiest worker's part of every layer of a network.

  Indices are positions in `Network.layers`. The busiest worker has the
  rounded-up part of every layer's channels; of a layer with fewer channels than
  workers, each of the first workers has one.

  Attributes:
    params: ShapeDtypeStructs of the worker's parameters, for each layer.
    inputs: ShapeDtypeStructs of what each layer reads.
    gathered: whole outputs that workers gather before some layer reads them.
    summed: those gathered outputs whose gradient is a sum over workers.
  """

  def __init__(self, network: reference.Network, images: int, parts: int):
    self.layers = network.layers
    outputs: dict[int, ShapedLike] = dict(enumerate(network.shapes(images)))
    whole, labels = network.batch(images)
    outputs |= {reference.IMAGES: whole, reference.LABELS: labels}
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
    is_whole = is_whole or index == reference.LABELS
    return like if is_whole else _channel_part(like, self._parts)

  def pass_seconds(
    self, device: perfmodel.Device
  ) -> tuple[list[float], list[float]]:
    """Predicts the seconds of each layer's forward and backward pass."""
    forward_s, backward_s = [], []
    for layer, params, inputs in zip(
      self.layers, self.params, self.inputs, strict=True
    ):
      one_s, both_s = (
        perfmodel.predict_seconds(cost, device)
        for cost in _layer_costs(
          layer.fn,
          tuple(sorted(params.items())),
          inputs,
          tuple(i >= 0 for i in layer.inputs),
        )
      )
      forward_s.append(one_s)
      # A vjp cannot be traced without its forward pass. Both passes together
      # may fuse into less than the forward pass alone: then backward is free.
      backward_s.append(max(both_s - one_s, 0.0))
    return forward_s, backward_s

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
) -> tuple[perfmodel.Cost, perfmodel.Cost]:
  """Returns the cost of a layer's forward pass, and of both its passes."""

  def both_passes(params: Any, inputs: Any, ct: Any) -> Any:
    y, vjp_fn = jax.vjp(fn, params, *inputs)
    param_grads, *grads = vjp_fn(ct)
    # Gradients of images and labels are not returned, so XLA would remove
    # what computes them: `predict_cost` does not count it either.
    wanted = [g for g, want in zip(grads, wants_grads, strict=True) if want]
    return y, param_grads, wanted

  ct = jax.eval_shape(fn, dict(params), *inputs)
  forward = perfmodel.predict_cost(fn, dict(params), *inputs)
  both = perfmodel.predict_cost(both_passes, dict(params), inputs, ct)
  return forward, both


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


class _Route(NamedTuple):
  """Axis, codec, devices and algorithm of the transfers of activations."""

  axis: perfmodel.Axis
  codec: codecs.Codec
  device: perfmodel.Device
  algorithm: str

  def gather(self, like: ShapedLike) -> TransferCost:
    """Predicts an all-gather of an array of which each worker has a part."""
    # Each worker encodes its part once and decodes the parts of all workers,
    # as `collectives.all_gather` does.
    part = _channel_part(like, self.axis.workers)
    one_s = extend.decode_seconds(self.codec, part.size, 1, self.device)
    return self._transfer("all_gather", part, 1, self.axis.workers * one_s)

  def reduce_scatter(self, like: ShapedLike) -> TransferCost:
    """Predicts a reduce-scatter of an array that each worker has as a whole."""
    # As in `collectives.reduce_scatter`, encoded parts cannot be added on the
    # way: an all-to-all brings them to their owner, which decodes and sums.
    workers = self.axis.workers
    part = _channel_part(like, workers)
    if self.codec == codecs.identity():
      return self._transfer("reduce_scatter", part, workers, 0.0)
    decode_s = extend.decode_seconds(
      self.codec, part.size, workers, self.device
    )
    return self._transfer("all_to_all", part, workers, decode_s)

  def _transfer(
    self, op: str, part: ShapedLike, rows: int, decode_s: float
  ) -> TransferCost:
    """Predicts a collective of `rows` encoded parts on each worker."""
    sent = op, rows * wire.payload_bytes(self.codec, part), self.axis.workers
    # All-to-alls are done by the ring algorithm alone.
    algorithm = "ring" if op == "all_to_all" else self.algorithm
    traffic = perfmodel.collective_traffic(*sent, algorithm=algorithm)
    return TransferCost(
      extend.encode_seconds(self.codec, rows * part.size, self.device),
      perfmodel.collective_seconds(*sent, self.axis.link, algorithm=algorithm),
      decode_s,
      traffic.wire_bytes,
    )
