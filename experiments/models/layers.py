"""Layers of the networks: frozen values with parameter shapes and a function.

Flax or Equinox would not do. A layer has to be hashable and a pure function of
its parameters and its input. Then a block that repeats can be the body of one
`lax.scan`, and `jax.checkpoint` can wrap it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax, nn

from jaxmotion.core import Array, PyTree, ShapedLike

See = Callable[[str, Array], None]
"""Receives a layer's name and the output of its ReLU or pooling."""


def skip_output(name: str, y: Array) -> None:
  """Ignores the output of a ReLU or pooling."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """One parameter array and the normal distribution that initializes it."""

  shape: tuple[int, ...]
  mean: float = 0.0
  deviation: float = 0.0

  @property
  def shape_dtype(self) -> jax.ShapeDtypeStruct:
    """The array's shape, as float32."""
    return jax.ShapeDtypeStruct(self.shape, "float32")


def kernel_spec(*shape: int, relu: bool = False) -> ParamSpec:
  """Returns a kernel of variance 2 / inputs before a ReLU, else 1 / inputs."""
  variance = (2.0 if relu else 1.0) / math.prod(shape[:-1])
  return ParamSpec(shape, deviation=math.sqrt(variance))


def param_shapes(layer: "Layer", x: ShapedLike) -> PyTree:
  """Returns the shapes of a layer's parameters for an input's shape."""
  return jax.tree.map(lambda spec: spec.shape_dtype, layer.specs(x))


def output_shape(layer: "Layer", x: ShapedLike) -> jax.ShapeDtypeStruct:
  """Returns the shape of a layer's output for an input's shape."""
  return jax.eval_shape(layer, param_shapes(layer, x), x)


class Layer(Protocol):
  """A pure function of its parameters and its input."""

  @property
  def name(self) -> str:
    """The key of the layer's parameters in its block."""
    ...

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns a `ParamSpec` for each parameter, given the input's shape."""
    ...

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Returns the layer's output."""
    ...


@dataclasses.dataclass(frozen=True)
class Conv:
  """A convolution with batch norm or a bias, then optionally a ReLU.

  Batch norm is that of training: with the mean and variance of the batch.
  """

  name: str  # Key of the parameters.
  features: int  # Channels of the output.
  # Height and width of the kernel, or a pair of both.
  size: int | tuple[int, int] = 3
  stride: int = 1  # Step of the window in both directions.
  # Rows and columns added on each side; None is half the kernel.
  padding: int | None = None
  norm: bool = False  # Whether batch norm follows.
  relu: bool = True  # Whether a ReLU follows.

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns `kernel`, `bias` and, with batch norm, `scale`."""
    shape = (*as_pair(self.size), x.shape[-1], self.features)
    spec = kernel_spec(*shape, relu=self.relu)
    # Output channels first, the order of cuDNN: with any other order XLA:GPU
    # keeps a transposed copy of all kernels of a scan.
    specs = {
      "kernel": dataclasses.replace(spec, shape=(self.features, *shape[:-1])),
      "bias": ParamSpec((self.features,)),
    }
    if self.norm:
      specs["scale"] = ParamSpec((self.features,), 1.0)
    return specs

  @property
  def pads(self) -> list[tuple[int, int]]:
    """The padding before and after, of height and of width."""
    return [
      (n // 2,) * 2 if self.padding is None else (self.padding,) * 2
      for n in as_pair(self.size)
    ]

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Maps `(batch, height, width, inputs)` to `(batch, ..., features)`."""
    y = lax.conv_general_dilated(
      x,
      params["kernel"],
      (self.stride,) * 2,
      self.pads,
      dimension_numbers=("NHWC", "OHWI", "NHWC"),
    )
    if self.norm:
      y = normalize(y, (0, 1, 2)) * per_channel(params["scale"], y)
    return _apply_relu(self, y + per_channel(params["bias"], y), see)


@dataclasses.dataclass(frozen=True)
class Dense:
  """A matmul of each flattened example, a bias, and optionally a ReLU."""

  name: str
  features: int
  relu: bool = True

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns `kernel` and `bias`."""
    inputs = math.prod(x.shape[1:])
    return {
      "kernel": kernel_spec(inputs, self.features, relu=self.relu),
      "bias": ParamSpec((self.features,)),
    }

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Maps `(batch, ...)` to `(batch, features)`."""
    y = x.reshape(x.shape[0], -1) @ params["kernel"]
    return _apply_relu(self, y + per_channel(params["bias"], y), see)


class WithoutParams:
  """Base of layers that have no parameters."""

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns an empty tree of parameters."""
    return {}


@dataclasses.dataclass(frozen=True)
class MaxPool(WithoutParams):
  """Max pooling over square windows."""

  name: str  # Key of the layer in its block.
  window: int  # Height and width of a window.
  stride: int = 2  # Step of the window in both directions.
  padding: int = 0  # Rows and columns added on each side.
  ceil: bool = False  # Whether a last, partial window is kept.

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Maps `(batch, height, width, channels)` to a smaller image."""
    y = lax.reduce_window(
      x,
      -jnp.inf,
      lax.max,
      (1, self.window, self.window, 1),
      (1, self.stride, self.stride, 1),
      ((0, 0), *map(self._pad_length, x.shape[1:3]), (0, 0)),
    )
    see(self.name, y)
    return y

  def _pad_length(self, length: int) -> tuple[int, int]:
    left_over = (length + 2 * self.padding - self.window) % self.stride
    more = self.stride - left_over if self.ceil and left_over else 0
    return self.padding, self.padding + more


@dataclasses.dataclass(frozen=True)
class MeanPool(WithoutParams):
  """Mean pooling with stride 1, over the pixels that lie inside the image."""

  name: str
  window: int = 3

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Maps `(batch, height, width, channels)` to the same shape."""
    pixels = jnp.ones((1, *x.shape[1:3], 1))
    y = self._sum_windows(x) / self._sum_windows(pixels)
    see(self.name, y)
    return y

  def _sum_windows(self, x: Array) -> Array:
    window = (1, self.window, self.window, 1)
    return lax.reduce_window(x, 0.0, lax.add, window, (1,) * 4, "SAME")


@dataclasses.dataclass(frozen=True)
class Call(WithoutParams):
  """A function without parameters, as a layer."""

  name: str
  fn: Callable[[Array], Array]

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Returns the function's value."""
    return self.fn(x)


def spatial_mean(x: Array) -> Array:
  """Returns the mean over height and width."""
  return x.mean((1, 2))


MEAN = Call("mean", spatial_mean)
"""Maps `(batch, height, width, channels)` to `(batch, channels)`."""


@dataclasses.dataclass(frozen=True)
class Chain:
  """Layers that run in sequence."""

  name: str
  layers: tuple[Layer, ...]

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns the parameters of each layer by its name."""
    specs = {}
    for layer in self.layers:
      specs[layer.name] = layer.specs(x)
      x = output_shape(layer, x)
    return specs

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Returns the last layer's output."""
    for layer in self.layers:
      x = layer(params[layer.name], x, see)
    return x


@dataclasses.dataclass(frozen=True)
class Join:
  """Parallel branches whose output channels are concatenated."""

  name: str
  branches: tuple[Layer, ...]

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns the parameters of each branch by its name."""
    return {b.name: b.specs(x) for b in self.branches}

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Returns the channels of all branches."""
    return join_channels(*(b(params[b.name], x, see) for b in self.branches))


@dataclasses.dataclass(frozen=True)
class Add:
  """A residual connection: the sum of a body and its shortcut."""

  name: str  # Key of the layer in its block.
  body: Layer  # Maps the input to the shape of the shortcut's output.
  shortcut: Layer | None = None  # The other branch; None is the input itself.
  relu: bool = True  # Whether a ReLU follows.

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns the parameters of each branch by its name."""
    return {b.name: b.specs(x) for b in self._branches()}

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Returns the sum of both branches."""
    y, *rest = (b(params[b.name], x, see) for b in self._branches())
    return _apply_relu(self, y + (rest[0] if rest else x), see)

  def _branches(self) -> tuple[Layer, ...]:
    return (self.body, self.shortcut) if self.shortcut else (self.body,)


def join_channels(*branches: Array) -> Array:
  """Concatenates arrays along their last axis."""
  return jnp.concatenate(branches, axis=-1)


def normalize(x: Array, axes: tuple[int, ...]) -> Array:
  """Shifts and scales `x` to mean 0 and variance 1 over `axes`."""
  centered = x - x.mean(axes, keepdims=True)
  variance = jnp.square(centered).mean(axes, keepdims=True)
  return centered * lax.rsqrt(variance + 1e-5)


def per_channel(vector: Array, y: Array) -> Array:
  """Reshapes `vector`, one element per channel, to broadcast over `y`."""
  return vector.reshape((1,) * (y.ndim - 1) + vector.shape)


def as_pair(size: int | tuple[int, int]) -> tuple[int, int]:
  """Returns height and width of a window given as one number or as both."""
  return (size, size) if isinstance(size, int) else size


def _apply_relu(layer: Conv | Dense | Add, y: Array, see: See) -> Array:
  if not layer.relu:
    return y
  y = nn.relu(y)
  see(layer.name, y)
  return y
