"""Reference networks as lists of layers, which `split_step` divides.

The layers are those of `make_network`, with every block's branches listed one
by one and every repeat on its own. They are the variants of torchvision, so
that their parameters and operations can be compared with published ones:
AlexNet of one column, VGG without batch norm, GoogLeNet with batch norm, 3x3 in
place of 5x5 and without auxiliary heads. Dropout is left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, nn

from experiments.models import catalog, layers
from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike

NETWORKS: dict[str, dict[str, Any]] = {
  "alexnet": {},
  "vgg11": {},
  "vgg16": {},
  "resnet18": {},
  "resnet34": {},
  "resnet50": {},
  "googlenet": {"variant": "torchvision"},
}
"""Options of `make_network` by the name of the network."""

IMAGES, LABELS = -1, -2
"""Positions of the layer inputs that are not layers: the batch's parts."""


class Layer(NamedTuple):
  """One layer of a network, a plain function of abstract arrays."""

  name: str  # Unique within the network.
  # `fn(params, *inputs)`, hashable; channels come last everywhere.
  fn: Callable[..., Array]
  # ShapeDtypeStructs by name, whose last axis is that of the layer's output
  # channels; `{}` for a layer without parameters.
  params: Mapping[str, ShapedLike]
  # Positions of the layers that are read; `IMAGES` and `LABELS` are the batch.
  inputs: tuple[int, ...]
  # Whether each output channel reads all channels of its inputs.
  mixes: bool = False


class Network(NamedTuple):
  """Layers in the order of the forward pass; the last one is the loss."""

  name: str  # The network's name.
  layers: tuple[Layer, ...]  # Each layer reads only layers before it.
  image: tuple[int, ...]  # Shape of one image, channels last.

  @property
  def params(self) -> dict[str, Mapping[str, ShapedLike]]:
    """The parameters by layer and name, as ShapeDtypeStructs."""
    return {layer.name: layer.params for layer in self.layers if layer.params}

  @property
  def size(self) -> int:
    """The number of parameters."""
    return sum(math.prod(a.shape) for a in jax.tree.leaves(self.params))

  def batch(self, images: int) -> tuple[ShapedLike, ShapedLike]:
    """Returns the shapes of a number of images and of their labels."""
    return (
      jax.ShapeDtypeStruct((images, *self.image), "float32"),
      jax.ShapeDtypeStruct((images,), "int32"),
    )

  def loss(self, params: PyTree, images: Array, labels: Array) -> Array:
    """Returns the mean loss of a batch."""
    return self._run_layers(params, images, labels)[-1]

  def shapes(self, images: int) -> list[ShapedLike]:
    """Returns the shapes of all layers' outputs for a number of images."""
    return list(
      jax.eval_shape(self._run_layers, self.params, *self.batch(images))
    )

  def _run_layers(
    self, params: PyTree, images: Array, labels: Array
  ) -> list[Array]:
    """Returns the outputs of all layers."""
    values: list[Array] = []
    for layer in self.layers:
      # IMAGES and LABELS count from the end, however many layers have run.
      known = [*values, labels, images]
      inputs = (known[i] for i in layer.inputs)
      values.append(layer.fn(params.get(layer.name, {}), *inputs))
    return values


@core.declare(name=core.choice(NETWORKS))
def reference_network(name: str) -> Network:
  """Returns a network for 224 x 224 images of 1000 classes.

  >>> reference_network("resnet50").size
  25557032

  References:
    Krizhevsky, One weird trick for parallelizing convolutional neural
    networks, 2014. Simonyan and Zisserman, Very deep convolutional networks
    for large-scale image recognition, 2015. He et al., Deep residual learning
    for image recognition, 2016. Szegedy et al., Going deeper with
    convolutions, 2015. Numbers: https://docs.pytorch.org/vision/stable/models
  """
  network = catalog.make_network(name, **NETWORKS[name])
  image = tuple(network.input.shape)
  builder = _LayerList(image)
  x = IMAGES
  for stage in network.stages:
    for i in range(stage.repeats):
      repeat = f"{stage.name}_{i}" if stage.repeats > 1 else stage.name
      x = builder.add_layer(repeat, stage.block, x)
  builder.append("loss", mean_cross_entropy, {}, (x, LABELS), mixes=True)
  return Network(name, tuple(builder.layers), image)


class _LayerList:
  """Appends layers and tracks the shapes of their outputs."""

  def __init__(self, image: tuple[int, ...]):
    self.layers: list[Layer] = []
    self._shapes: dict[int, ShapedLike] = {
      IMAGES: jax.ShapeDtypeStruct((1, *image), "float32"),
      LABELS: jax.ShapeDtypeStruct((1,), "int32"),
    }

  def add_layer(self, path: str, layer: layers.Layer, x: int) -> int:
    """Appends a layer, or those it contains; returns its output's position."""
    params = layers.param_shapes(layer, self._shapes[x])
    match layer:
      case layers.Chain():
        for own in layer.layers:
          x = self.add_layer(f"{path}/{own.name}", own, x)
        return x
      case layers.Join():
        branches = [
          self.add_layer(f"{path}/{own.name}", own, x) for own in layer.branches
        ]
        return self.append(
          path, _WithoutParams(layers.join_channels), {}, branches
        )
      case layers.Add():
        y = self.add_layer(f"{path}/{layer.body.name}", layer.body, x)
        if layer.shortcut:
          name = f"{path}/{layer.shortcut.name}"
          x = self.add_layer(name, layer.shortcut, x)
        return self.append(path, _WithoutParams(_add_relu), {}, (x, y))
      case layers.Conv():
        outputs, *inner = params["kernel"].shape
        params["kernel"] = jax.ShapeDtypeStruct((*inner, outputs), "float32")
        return self.append(path, _ConvLastAxis(layer), params, (x,), mixes=True)
      case layers.Dense():
        return self.append(path, layer, params, (x,), mixes=True)
      case layers.MaxPool() | layers.Call():
        return self.append(path, layer, params, (x,))
    raise TypeError(f"`layer` must be one of a list's layers, got {layer}.")

  def append(
    self,
    name: str,
    fn: Callable[..., Any],
    params: Mapping[str, ShapedLike],
    inputs: tuple[int, ...] | list[int],
    *,
    mixes: bool = False,
  ) -> int:
    """Appends one layer; returns the position of its output."""
    shapes = [self._shapes[i] for i in inputs]
    position = len(self.layers)
    self._shapes[position] = jax.eval_shape(fn, params, *shapes)
    layer = Layer(name, fn, params, tuple(inputs), mixes)
    self.layers.append(layer)
    return position


@dataclasses.dataclass(frozen=True)
class _ConvLastAxis:
  """A convolution whose kernel has its output channels last.

  `predict_split_step` splits the last axis of every parameter. Batch
  norm is written with as few operations per element as there can be.
  """

  conv: layers.Conv

  def __call__(self, params: Mapping[str, Array], x: Array) -> Array:
    y = lax.conv_general_dilated(
      x,
      params["kernel"],
      (self.conv.stride,) * 2,
      self.conv.pads,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    if self.conv.norm:
      mean = y.mean((0, 1, 2), keepdims=True)
      variance = jnp.square(y).mean((0, 1, 2), keepdims=True) - mean**2
      scale = params["scale"]
      y = (y - mean) * (
        lax.rsqrt(variance + 1e-5) * layers.per_channel(scale, y)
      )
    y = y + layers.per_channel(params["bias"], y)
    return nn.relu(y) if self.conv.relu else y


@dataclasses.dataclass(frozen=True)
class _WithoutParams:
  """A function of inputs alone, as a layer's function."""

  fn: Callable[..., Array]

  def __call__(self, params: Mapping[str, Array], *inputs: Array) -> Array:
    return self.fn(*inputs)


def _add_relu(x: Array, y: Array) -> Array:
  return nn.relu(x + y)


def mean_cross_entropy(
  params: Mapping[str, Array], logits: Array, labels: Array
) -> Array:
  """Returns the mean cross-entropy, without a gather of the logits."""
  chosen = nn.one_hot(labels, logits.shape[-1])
  return -(nn.log_softmax(logits) * chosen).sum(-1).mean()
