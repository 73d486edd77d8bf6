"""Networks as lists of layers, each a plain function of abstract arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike

IMAGES, LABELS = -1, -2
"""Positions of the layer inputs that are not layers: the batch's parts."""


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer of a network.

  Args:
    name: unique within the network.
    fn: `fn(params, *inputs)`, hashable; channels come last everywhere.
    params: ShapeDtypeStructs by name, whose last axis is that of the layer's
      output channels; `{}` for a layer without parameters.
    inputs: positions of the layers that are read; `IMAGES` (-1) and `LABELS`
      (-2) are the batch.
    mixes: whether each output channel reads all channels of its inputs.

  Raises:
    TypeError: an argument is of another class.
    ValueError: an input is below -2.

  Example:
    >>> import jax.numpy as jnp
    >>> relu = Layer("relu", lambda params, x: jax.nn.relu(x), {}, (0,))
    >>> relu.fn({}, jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
  """

  name: str
  fn: Callable[..., Array]
  params: Mapping[str, ShapedLike]
  inputs: tuple[int, ...]
  mixes: bool = False

  def __post_init__(self) -> None:
    core.check_text("name", self.name)
    core.check_callable("fn", self.fn)
    params = core.check_mapping("params", self.params, "names to shapes")
    core.check_arrays("params", params, numbers=False)
    inputs = core.check_sequence("inputs", self.inputs, "positions of layers")
    for i, position in enumerate(inputs):
      core.check_int(f"inputs[{i}]", position, LABELS)
    object.__setattr__(self, "inputs", inputs)
    core.check_bool("mixes", self.mixes)


@dataclasses.dataclass(frozen=True)
class Network:
  """A network as layers in the order of the forward pass; the last is the loss.

  Args:
    name: the network's name.
    layers: each layer reads only layers before it.
    image: shape of one image, channels last.

  Raises:
    TypeError: an argument is of another class.
    ValueError: two layers have one name, or a layer reads one after it.

  Example:
    >>> import jax.numpy as jnp
    >>> from jaxmotion.perfmodel import predict_cost
    >>> def dense(params, x):
    ...   return x @ params["kernel"]
    >>> def loss(params, y, labels):
    ...   return jnp.mean((y[:, 0] - labels) ** 2)
    >>> kernel = jax.ShapeDtypeStruct((64, 10), "float32")
    >>> net = Network(
    ...   "linear",
    ...   (
    ...     Layer("dense", dense, {"kernel": kernel}, (IMAGES,), mixes=True),
    ...     Layer("loss", loss, {}, (0, LABELS), mixes=True),
    ...   ),
    ...   image=(64,),
    ... )
    >>> net.size
    640
    >>> step = predict_cost(jax.grad(net.loss), net.params, *net.batch(8))
    >>> int(step.totals["matmul"].flops)  # two matmuls of 8 x 64 x 10
    20480
  """

  name: str
  layers: tuple[Layer, ...]
  image: tuple[int, ...]

  def __post_init__(self) -> None:
    core.check_text("name", self.name)
    layers = core.check_sequence("layers", self.layers, "Layer objects")
    if not layers:
      raise ValueError("`layers` must have a layer, the loss, got none.")
    names = set()
    for i, layer in enumerate(layers):
      core.check_instance(f"layers[{i}]", layer, Layer, "a Layer")
      if layer.name in names:
        raise ValueError(
          f"`layers[{i}]` must have a name of its own, got {layer.name!r}."
        )
      names.add(layer.name)
      for position in layer.inputs:
        if position >= i:
          raise ValueError(
            f"`layers[{i}]` must read layers before it, got {position} in "
            "its inputs."
          )
    object.__setattr__(self, "layers", layers)
    image = core.check_sequence("image", self.image, "lengths")
    for i, length in enumerate(image):
      core.check_int(f"image[{i}]", length, 1)
    object.__setattr__(self, "image", image)

  @property
  def params(self) -> dict[str, Mapping[str, ShapedLike]]:
    """The parameters by layer and name, as ShapeDtypeStructs."""
    return {layer.name: layer.params for layer in self.layers if layer.params}

  @property
  def size(self) -> int:
    """The number of parameters."""
    return sum(math.prod(a.shape) for a in jax.tree.leaves(self.params))

  def batch(self, images: int) -> tuple[ShapedLike, ShapedLike]:
    """Returns the shapes of a number of images and of their labels.

    Args:
      images: number of images.

    Raises:
      TypeError: `images` is not an integer.
      ValueError: `images` is not positive.
    """
    core.check_int("images", images, 1)
    return (
      jax.ShapeDtypeStruct((images, *self.image), "float32"),
      jax.ShapeDtypeStruct((images,), "int32"),
    )

  def loss(self, params: PyTree, images: Array, labels: Array) -> Array:
    """Returns the mean loss of a batch.

    Args:
      params: arrays of the names and shapes of `Network.params`.
      images: array of the shape (number, *image).
      labels: array of one label for each image.

    Raises:
      TypeError: an argument has a leaf that is no array.
      ValueError: an argument has another shape.
    """
    core.check_like("params", params, self.params, "`Network.params`")
    core.check_arrays("images", images, numbers=False)
    shape = getattr(images, "shape", ())
    if not shape or shape[1:] != self.image:
      raise ValueError(
        f"`images` must have the shape (number, *{self.image}), got {shape}."
      )
    core.check_like(
      "labels", labels, self.batch(shape[0])[1], "`Network.batch`"
    )
    return self._run_layers(params, images, labels)[-1]

  def shapes(self, images: int) -> list[ShapedLike]:
    """Returns the shapes of all layers' outputs for a number of images.

    Args:
      images: number of images.

    Raises:
      TypeError: `images` is not an integer.
      ValueError: `images` is not positive.
    """
    return list(
      jax.eval_shape(self._run_layers, self.params, *self.batch(images))
    )

  def _run_layers(
    self, params: PyTree, images: Array, labels: Array
  ) -> list[Array]:
    values: list[Any] = []
    for layer in self.layers:
      # IMAGES and LABELS count from the end, however many layers have run.
      known = [*values, labels, images]
      inputs = (known[i] for i in layer.inputs)
      values.append(layer.fn(params.get(layer.name, {}), *inputs))
    return values
