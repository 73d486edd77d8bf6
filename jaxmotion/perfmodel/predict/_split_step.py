"""The time and memory of a step whose layers are split over workers."""

from __future__ import annotations

import dataclasses
import math

import jax

from jaxmotion.codecs import Codec, identity
from jaxmotion.core import check_int, tree_bytes
from jaxmotion.perfmodel.cost import Kernel
from jaxmotion.perfmodel.networks import Network
from jaxmotion.perfmodel.platform import Device, Platform, find_axis
from jaxmotion.perfmodel.predict._exchange import ExchangePrediction
from jaxmotion.perfmodel.predict._layout import make_layout
from jaxmotion.perfmodel.predict._overlap import Message
from jaxmotion.perfmodel.predict._roofline import (
  kernel_seconds,
  predict_seconds,
)
from jaxmotion.perfmodel.predict._split_layers import (
  LayerSplit,
  Moved,
  gather_parts,
  scatter_sum,
)
from jaxmotion.perfmodel.predict._step import (
  StepPrediction,
  exchange_messages,
  make_step,
)


def predict_split_step(
  network: Network,
  batch: int,
  platform: Platform,
  *,
  data_axis: str | None = None,
  model_axis: str | None = None,
  codec: Codec | None = None,
  activation_codec: Codec | None = None,
  bucket_bytes: int | None = None,
  overlap: bool = True,
  state_copies: int = 0,
  algorithm: str = "ring",
) -> StepPrediction:
  """Predicts a step in which layers are split, the batch, or both.

  Over `model_axis`, worker `r` of `M` computes its `1 / M` of the output
  channels of every layer. Before a layer that reads all channels of what
  others computed, they are gathered; its gradient with respect to them is a
  sum over workers, each of which keeps its own part (a reduce-scatter). The
  loss, which has no parameters, is computed by all of them. Over
  `data_axis` each group of `M` has its part of the batch, and gradients of
  the split parameters are exchanged while the backward pass goes on. Either
  axis alone is channel-split model parallelism or data parallelism.

  A layer of fewer channels than workers leaves some of them idle; what is
  predicted is the busiest worker. Layers are costed one by one, so nothing
  fuses across them.

  Args:
    network: what is trained.
    batch: images of all workers together; the data axis divides it.
    platform: devices and links.
    data_axis: the axis over which the batch is split, if it is.
    model_axis: the axis over which channels are split, if they are.
    codec: of gradients over the data axis; None is full precision.
    activation_codec: of activations and their gradients over the model axis.
    bucket_bytes: as for `data_parallel`; 1 is a bucket for each layer.
    overlap: whether gradients move beside the backward pass.
    state_copies: arrays of the parameters' size that the optimiser keeps.
    algorithm: of the collectives, as for `traffic`.

  Returns:
    The step. Its update reads parameters, gradients and the optimiser's
    arrays and writes all but gradients.

  Raises:
    ValueError: a batch that the data axis does not divide, one axis for both,
      an axis that the platform has not.

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
  if data_axis is not None and data_axis == model_axis:
    raise ValueError(
      f"`model_axis` must be another axis than `data_axis`, got {model_axis!r}."
    )
  check_int("batch", batch, 1)
  check_int("state_copies", state_copies, 0)
  groups = axis = None
  if data_axis is not None:
    groups = find_axis(platform, "data_axis", data_axis)
  if model_axis is not None:
    axis = find_axis(platform, "model_axis", model_axis)
  if groups and batch % groups.workers:
    raise ValueError(
      f"`batch` must be a multiple of the {groups.workers} workers on "
      f"{data_axis!r}, got {batch}."
    )
  images = batch // (groups.workers if groups else 1)
  split = LayerSplit(network, images, axis.workers if axis else 1)
  gathers: dict[int, Moved] = {}
  scatters: dict[int, Moved] = {}
  if axis is not None:
    how = (axis, activation_codec or identity(), platform.device, algorithm)
    gathers = {i: gather_parts(v, *how) for i, v in split.gathered.items()}
    scatters = {i: scatter_sum(v, *how) for i, v in split.summed.items()}
  forward, backward = _pass_seconds(split, platform.device)
  sizes = [tree_bytes(params) for params in split.params]

  # The first gradient comes after the forward pass. Before the backward pass
  # of a layer, the gradient of what it has made is summed.
  clock = math.fsum(forward) + math.fsum(m.total_s for m in gathers.values())
  there: dict[str, dict[str, float]] = {}
  for i in reversed(range(len(backward))):
    clock += backward[i] + scatters.get(i, Moved()).total_s
    there[network.layers[i].name] = dict.fromkeys(split.params[i], clock)
  messages = [Message(clock, 0.0, 0.0, 0.0)]
  exchanges: list[ExchangePrediction] = []
  if groups is not None:
    grads = {
      layer.name: params
      for layer, params in zip(network.layers, split.params, strict=True)
    }
    plan = make_layout(grads, groups, codec, None, None)
    messages, exchanges = exchange_messages(
      plan, jax.tree.leaves(there), clock, platform, bucket_bytes, algorithm
    )
  step = make_step(
    messages,
    exchanges,
    compute_s=math.fsum(forward) + math.fsum(backward),
    update_s=_update_seconds(sizes, state_copies, platform.device),
    call_s=platform.device.call_s,
    memory_bytes=(2 + state_copies) * sum(sizes) + split.kept_bytes,
    overlap=overlap,
  )
  activations = [*gathers.values(), *scatters.values()]
  return dataclasses.replace(
    step,
    encode_s=step.encode_s + math.fsum(m.encode_s for m in activations),
    link_s=step.link_s + math.fsum(m.link_s for m in activations),
    decode_s=step.decode_s + math.fsum(m.decode_s for m in activations),
    wire_bytes=step.wire_bytes + math.fsum(m.wire_bytes for m in activations),
  )


def _pass_seconds(
  split: LayerSplit, device: Device
) -> tuple[list[float], list[float]]:
  """Seconds of each layer forward, and backward."""
  forward, backward = [], []
  for i in range(len(split.layers)):
    there, both = (predict_seconds(cost, device) for cost in split.costs(i))
    forward.append(there)
    backward.append(max(both - there, 0.0))
  return forward, backward


def _update_seconds(
  sizes: list[int], state_copies: int, device: Device
) -> float:
  """Seconds of updates, each layer's a kernel of 2 FLOPs a value and copy."""
  passes = 3 + 2 * state_copies
  return math.fsum(
    kernel_seconds(
      Kernel("elementwise", "float32", passes * n / 4, passes * n), device
    )
    for n in sizes
    if n
  )
