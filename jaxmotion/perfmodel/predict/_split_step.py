"""Predicts a step whose channels, batch or both are split over workers.

The timeline has two kinds of communication. Activations and their gradients
(over `model_axis`) are needed by the next layer at once: their seconds are
added to the clock and overlap with nothing. Gradients of parameters (over
`data_axis`) are needed by the update alone: they go through the same buckets
and overlap model as in `predict_step`.
"""

from __future__ import annotations

import dataclasses
import math

import jax

from jaxmotion import codecs, core
from jaxmotion.perfmodel.cost import Kernel
from jaxmotion.perfmodel.networks import Network
from jaxmotion.perfmodel.platform import Device, Platform
from jaxmotion.perfmodel.predict import (
  _checks,
  _collectives,
  _exchange,
  _layout,
  _overlap,
  _roofline,
  _split_layers,
  _step,
)


def predict_split_step(
  network: Network,
  batch: int,
  platform: Platform,
  *,
  data_axis: str | None = None,
  model_axis: str | None = None,
  codec: codecs.Codec | None = None,
  activation_codec: codecs.Codec | None = None,
  bucket_bytes: int | None = None,
  overlap: bool = True,
  state_copies: int = 0,
  algorithm: str = "ring",
) -> _step.StepPrediction:
  """Predicts a step whose channels, batch or both are split over workers.

  Over `model_axis`, worker `r` of `M` computes its `1 / M` of the output
  channels of every layer. A layer that reads all channels of its input has
  them gathered first. The gradient of that input is a sum over workers, of
  which each worker keeps its own part (a reduce-scatter). All workers compute
  the loss, which has no parameters.

  Over `data_axis`, each group of `M` workers has its part of the batch.
  Gradients of the split parameters are exchanged while the backward pass goes
  on. One axis alone is channel-split model parallelism or data parallelism.

  A layer with fewer channels than workers leaves some of them idle; the
  prediction is that of the busiest worker. Layers are costed one by one, so
  nothing fuses across them.

  Args:
    network: the network that is trained.
    batch: number of images of all workers together, a multiple of the workers
      on `data_axis`.
    platform: devices and links.
    data_axis: name of the axis that splits the batch; None for none.
    model_axis: name of the axis that splits channels; None for none.
    codec: codec of gradients over `data_axis`; None sends full precision.
    activation_codec: codec of activations and their gradients over
      `model_axis`; None sends full precision.
    bucket_bytes: least bytes of gradients in every bucket but the last; None
      is one bucket, 1 a bucket for each layer.
    overlap: whether gradients are exchanged during the backward pass.
    state_copies: number of arrays of the parameters' size in the optimizer's
      state (Adam: 2).
    algorithm: "ring", "halving_doubling" or "tree", as in
      `collective_traffic`.

  Returns:
    The step. Its update reads parameters, gradients and optimizer state, and
    writes all but gradients.

  Raises:
    TypeError: `batch` or `state_copies` is not an integer, or an argument is
      of another class.
    ValueError: `data_axis` does not divide the batch, both axes are the same,
      the platform has no such axis, or `algorithm` is unknown.

  Example:
    >>> from jaxmotion.perfmodel import IMAGES, LABELS, Layer, builtin_platform
    >>> cluster = builtin_platform("ethernet_1gbit")
    >>> def dense(params, x):
    ...   return x @ params["kernel"]
    >>> def loss(params, y, labels):
    ...   return ((y[:, 0] - labels) ** 2).mean()
    >>> kernel = {"kernel": jax.ShapeDtypeStruct((4096, 4096), "float32")}
    >>> layers = (
    ...   Layer("dense", dense, kernel, (IMAGES,), mixes=True),
    ...   Layer("loss", loss, {}, (0, LABELS), mixes=True),
    ... )
    >>> net = Network("dense", layers, image=(4096,))
    >>> by_batch = predict_split_step(net, 64, cluster, data_axis="data")
    >>> by_channel = predict_split_step(net, 64, cluster, model_axis="data")
    >>> by_batch.wire_bytes > by_channel.wire_bytes
    True
    >>> by_batch.memory_bytes > by_channel.memory_bytes
    True
  """
  core.check_instance("network", network, Network, "a Network")
  _checks.check_platform(platform)
  _checks.check_codec_given("codec", codec)
  _checks.check_codec_given("activation_codec", activation_codec)
  core.check_bool("overlap", overlap)
  _collectives.check_algorithm(algorithm)
  if data_axis is not None and data_axis == model_axis:
    raise ValueError(
      f"`model_axis` must be another axis than `data_axis`, got {model_axis!r}."
    )
  core.check_int("batch", batch, 1)
  core.check_int("state_copies", state_copies, 0)
  groups = sharers = None
  if data_axis is not None:
    groups = _checks.named_axis(platform, "data_axis", data_axis)
  if model_axis is not None:
    sharers = _checks.named_axis(platform, "model_axis", model_axis)
  if groups and batch % groups.workers:
    raise ValueError(
      f"`batch` must be a multiple of the {groups.workers} workers on "
      f"{data_axis!r}, got {batch}."
    )
  device = platform.device
  images = batch // (groups.workers if groups else 1)
  split = _split_layers.LayerSplit(
    network, images, sharers.workers if sharers else 1
  )
  # Transfers over `model_axis`, by the layer whose output they move.
  gathers: dict[int, _split_layers.TransferCost] = {}
  scatters: dict[int, _split_layers.TransferCost] = {}
  if sharers is not None:
    route = (sharers, activation_codec or codecs.identity(), device, algorithm)
    gathers = {
      i: _split_layers.gather_channels(like, *route)
      for i, like in split.gathered.items()
    }
    scatters = {
      i: _split_layers.reduce_scatter_channels(like, *route)
      for i, like in split.summed.items()
    }
  forward_s, backward_s = _pass_seconds(split, device)
  sizes = [core.tree_bytes(params) for params in split.params]

  # The forward pass and its gathers come before the first gradient. Before
  # the backward pass of a layer, the gradient of its output is summed.
  clock = math.fsum(forward_s) + math.fsum(m.total_s for m in gathers.values())
  ready_s: dict[str, dict[str, float]] = {}
  for i in reversed(range(len(backward_s))):
    clock += (
      backward_s[i] + scatters.get(i, _split_layers.TransferCost()).total_s
    )
    ready_s[network.layers[i].name] = dict.fromkeys(split.params[i], clock)
  messages = [_overlap.Message(clock, 0.0, 0.0, 0.0)]
  exchanges: list[_exchange.ExchangePrediction] = []
  if groups is not None:
    grads = {
      layer.name: params
      for layer, params in zip(network.layers, split.params, strict=True)
    }
    layout = _layout.make_layout(grads, groups, codec, None, None)
    # Both are dicts of dicts with the same keys: `jax.tree.leaves` sorts keys,
    # so leaves of `ready_s` are in the order of the layout's leaves.
    leaves_s = jax.tree.leaves(ready_s)
    messages, exchanges = _step.predict_buckets(
      layout, leaves_s, clock, platform, bucket_bytes, algorithm
    )
  step = _step.assemble_prediction(
    messages,
    exchanges,
    compute_s=math.fsum(forward_s) + math.fsum(backward_s),
    update_s=_update_seconds(sizes, state_copies, device),
    call_s=device.call_s,
    memory_bytes=(2 + state_copies) * sum(sizes) + split.residual_bytes,
    overlap=overlap,
  )
  # The clock has delayed the messages by the transfers of activations, so
  # `total_s` includes them already; the sums by phase do not.
  activations = [*gathers.values(), *scatters.values()]
  return dataclasses.replace(
    step,
    encode_s=step.encode_s + math.fsum(m.encode_s for m in activations),
    link_s=step.link_s + math.fsum(m.link_s for m in activations),
    decode_s=step.decode_s + math.fsum(m.decode_s for m in activations),
    wire_bytes=step.wire_bytes + math.fsum(m.wire_bytes for m in activations),
  )


def _pass_seconds(
  split: _split_layers.LayerSplit, device: Device
) -> tuple[list[float], list[float]]:
  """Predicts the seconds of each layer's forward and backward pass."""
  forward_s, backward_s = [], []
  for i in range(len(split.layers)):
    one_s, both_s = (
      _roofline.predict_seconds(cost, device) for cost in split.layer_costs(i)
    )
    forward_s.append(one_s)
    # A vjp cannot be traced without its forward pass. Both passes together
    # may fuse into less than the forward pass alone: then backward is free.
    backward_s.append(max(both_s - one_s, 0.0))
  return forward_s, backward_s


def _update_seconds(
  sizes: list[int], state_copies: int, device: Device
) -> float:
  """Predicts the update's seconds: one memory-bound kernel for each layer."""
  # The kernel reads parameters, gradients and state, and writes parameters and
  # state: `3 + 2 * state_copies` passes over the layer's bytes, with one FLOP
  # for each float32 element of each pass.
  passes = 3 + 2 * state_copies
  return math.fsum(
    _roofline.kernel_seconds(
      Kernel("elementwise", "float32", passes * n / 4, passes * n), device
    )
    for n in sizes
    if n
  )
