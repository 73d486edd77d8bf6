"""Layers whose output channels are split over workers, and what they move."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmotion.codecs import Codec, identity
from jaxmotion.core import ShapedLike, tree_bytes
from jaxmotion.perfmodel.cost import Cost, predict_cost
from jaxmotion.perfmodel.networks import IMAGES, LABELS, Network
from jaxmotion.perfmodel.platform import Axis, Device
from jaxmotion.perfmodel.predict._codecs import decode_seconds, encode_seconds
from jaxmotion.perfmodel.predict._collectives import (
  collective_seconds,
  collective_traffic,
)
from jaxmotion.wire import payload_bytes


class LayerSplit:
  """A network of which each worker computes a part of all channels.

  Args:
    network: whose layers are split.
    images: that each worker reads.
    parts: workers; of fewer channels, each of the first has one.
  """

  def __init__(self, network: Network, images: int, parts: int):
    self.layers = network.layers
    outputs: dict[int, ShapedLike] = dict(enumerate(network.shapes(images)))
    outputs[IMAGES], outputs[LABELS] = network.batch(images)
    self._parts = parts
    self.params = [
      jax.tree.map(lambda a: _part(a, parts), dict(layer.params))
      for layer in self.layers
    ]
    self.inputs = [
      tuple(self._seen(outputs[i], i, layer.mixes) for i in layer.inputs)
      for layer in self.layers
    ]
    mixing = [layer for layer in self.layers if layer.mixes]
    # Values of which each worker has a part and needs the whole, and those
    # whose gradient is a sum over workers: what has no parameters (the loss)
    # is the same on all of them.
    read = {i for layer in mixing for i in layer.inputs if i >= 0}
    summed = {i for layer in mixing if layer.params for i in layer.inputs}
    alone = parts == 1
    self.gathered = {} if alone else {i: outputs[i] for i in sorted(read)}
    self.summed = {i: v for i, v in self.gathered.items() if i in summed}

  def _seen(self, like: ShapedLike, place: int, whole: bool) -> ShapedLike:
    return like if whole or place == LABELS else _part(like, self._parts)

  def costs(self, place: int) -> tuple[Cost, Cost]:
    """The cost of a layer's forward pass, and of both passes."""
    layer = self.layers[place]
    wanted = tuple(i >= 0 for i in layer.inputs)
    params = tuple(sorted(self.params[place].items()))
    return _costs(layer.fn, params, self.inputs[place], wanted)

  @property
  def kept_bytes(self) -> int:
    """Of the activations that layers read again in the backward pass."""
    kept = {
      (i, like.shape): like
      for layer, likes in zip(self.layers, self.inputs, strict=True)
      for i, like in zip(layer.inputs, likes, strict=True)
    }
    return tree_bytes(list(kept.values()))


@functools.lru_cache(maxsize=4096)
def _costs(
  fn: Callable[..., Any],
  params: tuple[tuple[str, ShapedLike], ...],
  inputs: tuple[ShapedLike, ...],
  wanted: tuple[bool, ...],
) -> tuple[Cost, Cost]:
  def both(params: Any, inputs: Any, ct: Any) -> Any:
    y, pull = jax.vjp(fn, params, *inputs)
    grads, *rest = pull(ct)
    return y, grads, [g for g, use in zip(rest, wanted, strict=True) if use]

  ct = jax.eval_shape(fn, dict(params), *inputs)
  forward = predict_cost(fn, dict(params), *inputs)
  return forward, predict_cost(both, dict(params), inputs, ct)


def _part(like: ShapedLike, parts: int) -> jax.ShapeDtypeStruct:
  *outer, channels = like.shape
  return jax.ShapeDtypeStruct((*outer, -(-channels // parts)), like.dtype)


class Moved(NamedTuple):
  """What it takes to move an array over an axis."""

  encode_s: float = 0.0
  link_s: float = 0.0
  decode_s: float = 0.0
  wire_bytes: float = 0.0

  @property
  def total_s(self) -> float:
    """Seconds of all phases."""
    return self.encode_s + self.link_s + self.decode_s


def gather_parts(
  like: ShapedLike, axis: Axis, codec: Codec, device: Device, algorithm: str
) -> Moved:
  """All parts of an array to all workers, as `collectives.all_gather`."""
  part = _part(like, axis.workers)
  decode = axis.workers * decode_seconds(codec, part.size, 1, device)
  return _moved("all_gather", codec, part, 1, axis, device, decode, algorithm)


def scatter_sum(
  like: ShapedLike, axis: Axis, codec: Codec, device: Device, algorithm: str
) -> Moved:
  """To each worker its part of a sum, as `collectives.reduce_scatter`."""
  part = _part(like, axis.workers)
  if codec == identity():
    op, decode = "reduce_scatter", 0.0
  else:
    op = "all_to_all"
    decode = decode_seconds(codec, part.size, axis.workers, device)
  n = axis.workers
  return _moved(op, codec, part, n, axis, device, decode, algorithm)


def _moved(
  op: str,
  codec: Codec,
  part: ShapedLike,
  rows: int,
  axis: Axis,
  device: Device,
  decode_s: float,
  algorithm: str,
) -> Moved:
  nbytes = rows * payload_bytes(codec, part)
  algorithm = algorithm if op != "all_to_all" else "ring"
  how = {"algorithm": algorithm}
  return Moved(
    encode_seconds(codec, rows * part.size, device),
    collective_seconds(op, nbytes, axis.workers, axis.link, **how),
    decode_s,
    collective_traffic(op, nbytes, axis.workers, **how).wire_bytes,
  )
