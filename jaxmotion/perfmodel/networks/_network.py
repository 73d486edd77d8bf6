"""Networks as lists of layers, each a plain function of abstract arrays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion.core import Array, PyTree, ShapedLike

IMAGES, LABELS = -1, -2
"""What a layer reads that reads no other layer."""


@dataclasses.dataclass(frozen=True)
class Layer:
  """One layer of a network.

  Args:
    name: of its own.
    fn: `fn(params, *inputs)`, hashable; channels come last everywhere.
    params: pytree of ShapeDtypeStructs whose last axis is that of its output
      channels; `{}` if it has none.
    inputs: positions of the layers it reads; `IMAGES` (-1), `LABELS` (-2).
    mixes: whether each output channel reads all channels of its inputs.

  Example:
    >>> relu = Layer("relu", lambda params, x: jax.nn.relu(x), {}, (0,))
    >>> relu.fn({}, jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
  """

  name: str
  fn: Callable[..., Array]
  params: Mapping[str, ShapedLike]
  inputs: tuple[int, ...]
  mixes: bool = False


@dataclasses.dataclass(frozen=True)
class Network:
  """A network: its layers in order, the last one being the loss.

  Args:
    name: what it is called.
    layers: each reads only those before it.
    image: shape of one image, channels last.

  Example:
    >>> from jaxmotion.perfmodel import predict_cost, reference_network
    >>> net = reference_network("resnet18")
    >>> images, labels = net.batch(1)
    >>> step = predict_cost(jax.grad(net.loss), net.params, images, labels)
    >>> round(step.flops / 1e9, 1)
    9.9
  """

  name: str
  layers: tuple[Layer, ...]
  image: tuple[int, ...]

  @property
  def params(self) -> dict[str, Mapping[str, ShapedLike]]:
    """The parameters of every layer that has some, as ShapeDtypeStructs."""
    return {layer.name: layer.params for layer in self.layers if layer.params}

  @property
  def size(self) -> int:
    """Number of parameters."""
    return sum(math.prod(a.shape) for a in jax.tree.leaves(self.params))

  def batch(self, images: int) -> tuple[ShapedLike, ShapedLike]:
    """The shapes of so many images and their labels."""
    return (
      jax.ShapeDtypeStruct((images, *self.image), "float32"),
      jax.ShapeDtypeStruct((images,), "int32"),
    )

  def loss(self, params: PyTree, images: Array, labels: Array) -> Array:
    """The mean cross-entropy of a batch."""
    return self._run(params, images, labels)[-1]

  def shapes(self, images: int) -> list[ShapedLike]:
    """The shapes of all layers' outputs for so many images."""
    return list(jax.eval_shape(self._run, self.params, *self.batch(images)))

  def _run(self, params: PyTree, images: Array, labels: Array) -> list[Array]:
    values: list[Any] = []
    for layer in self.layers:
      # Negative positions come last, whatever has been computed.
      known = [*values, labels, images]
      inputs = (known[i] for i in layer.inputs)
      values.append(layer.fn(params.get(layer.name, {}), *inputs))
    return values


@dataclasses.dataclass(frozen=True)
class Convolution:
  """Convolution, then batch norm, bias and ReLU where they are asked for."""

  stride: int = 1
  padding: int = 0
  relu: bool = True

  def __call__(self, params: Mapping[str, Array], x: Array) -> Array:
    y = lax.conv_general_dilated(
      x,
      params["kernel"],
      (self.stride,) * 2,
      ((self.padding,) * 2,) * 2,
      dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    if "scale" in params:
      mean = y.mean((0, 1, 2), keepdims=True)
      variance = jnp.square(y).mean((0, 1, 2), keepdims=True) - mean**2
      y = (y - mean) * (lax.rsqrt(variance + 1e-5) * _wide(params["scale"], y))
    y = y + _wide(params["bias"], y)
    return jax.nn.relu(y) if self.relu else y


@dataclasses.dataclass(frozen=True)
class Dense:
  """Matrix product of the flattened input, bias, and ReLU if asked for."""

  relu: bool = False

  def __call__(self, params: Mapping[str, Array], x: Array) -> Array:
    y = x.reshape(x.shape[0], -1) @ params["kernel"]
    y = y + _wide(params["bias"], y)
    return jax.nn.relu(y) if self.relu else y


@dataclasses.dataclass(frozen=True)
class Pool:
  """Maximum of a window; `padding` is (before, after) of each dimension."""

  window: int
  stride: int
  padding: tuple[int, int] = (0, 0)

  def __call__(self, params: Mapping[str, Array], x: Array) -> Array:
    return lax.reduce_window(
      x,
      -jnp.inf,
      lax.max,
      (1, self.window, self.window, 1),
      (1, self.stride, self.stride, 1),
      ((0, 0), self.padding, self.padding, (0, 0)),
    )


@dataclasses.dataclass(frozen=True)
class AveragePool:
  """Mean over space."""

  def __call__(self, params: Mapping[str, Array], x: Array) -> Array:
    return x.mean((1, 2))


@dataclasses.dataclass(frozen=True)
class AddRelu:
  """Sum of two branches, then ReLU."""

  def __call__(self, params: Mapping[str, Array], x: Array, y: Array) -> Array:
    return jax.nn.relu(x + y)


@dataclasses.dataclass(frozen=True)
class Join:
  """Channels of several branches, one after the other."""

  def __call__(self, params: Mapping[str, Array], *x: Array) -> Array:
    return jnp.concatenate(x, axis=-1)


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
  """Mean cross-entropy of logits and labels."""

  def __call__(
    self, params: Mapping[str, Array], logits: Array, labels: Array
  ) -> Array:
    chosen = jax.nn.one_hot(labels, logits.shape[-1])
    return -(jax.nn.log_softmax(logits) * chosen).sum(-1).mean()


def _wide(vector: Array, like: Array) -> Array:
  return vector.reshape((1,) * (like.ndim - 1) + vector.shape)
