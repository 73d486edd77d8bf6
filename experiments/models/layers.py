"""Layers: frozen values that say what parameters they need and run them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax, nn

from jaxmotion.core import Array, PyTree, ShapedLike

See = Callable[[str, Array], None]
"""Is told a layer's name and what comes out of its ReLU or pooling."""


def ignore(name: str, y: Array) -> None:
  """Sees nothing."""


@dataclasses.dataclass(frozen=True)
class Spec:
  """An array of parameters before it is drawn, from a normal distribution."""

  shape: tuple[int, ...]
  mean: float = 0.0
  deviation: float = 0.0

  @property
  def like(self) -> jax.ShapeDtypeStruct:
    """Its shape, of float32."""
    return jax.ShapeDtypeStruct(self.shape, "float32")


def kernel(*shape: int, relu: bool = False) -> Spec:
  """Of variance 2 / inputs before a ReLU and 1 / inputs elsewhere."""
  variance = (2.0 if relu else 1.0) / math.prod(shape[:-1])
  return Spec(shape, deviation=math.sqrt(variance))


def after(layer: "Layer", x: ShapedLike) -> jax.ShapeDtypeStruct:
  """The shape of a layer's output."""
  likes = jax.tree.map(lambda spec: spec.like, layer.specs(x))
  return jax.eval_shape(layer, likes, x)


class Layer(Protocol):
  """A function of its parameters and its input alone.

  Attributes:
    name: of its own within a block.
  """

  @property
  def name(self) -> str:
    """What its parameters are found by."""
    ...

  def specs(self, x: ShapedLike) -> PyTree:
    """Its parameters for inputs of this shape."""
    ...

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """The output."""
    ...


@dataclasses.dataclass(frozen=True)
class Conv:
  """A convolution; batch norm or a bias; a ReLU unless there is to be none.

  Batch norm is that of training: with the mean and variance of the batch.

  Args:
    name: of the layer.
    features: channels of the output.
    size: height and width of the kernel, or both.
    stride: in both directions.
    padding: before and after; None is half the kernel.
    norm: whether batch norm follows.
    relu: whether a ReLU follows.
  """

  name: str
  features: int
  size: int | tuple[int, int] = 3
  stride: int = 1
  padding: int | None = None
  norm: bool = False
  relu: bool = True

  def specs(self, x: ShapedLike) -> PyTree:
    """`kernel`, `bias` and, of batch norm, `scale`."""
    shape = (*_pair(self.size), x.shape[-1], self.features)
    spec = kernel(*shape, relu=self.relu)
    # In the order that cuDNN has them in: XLA:GPU would keep a copy of all
    # kernels of a loop in that order otherwise.
    specs = {
      "kernel": dataclasses.replace(spec, shape=(self.features, *shape[:-1])),
      "bias": Spec((self.features,)),
    }
    return (
      specs | {"scale": Spec((self.features,), 1.0)} if self.norm else specs
    )

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """Maps `(batch, height, width, inputs)` to `(batch, ..., features)`."""
    pads = [
      (n // 2,) * 2 if self.padding is None else (self.padding,) * 2
      for n in _pair(self.size)
    ]
    y = lax.conv_general_dilated(
      x,
      params["kernel"],
      (self.stride,) * 2,
      pads,
      dimension_numbers=("NHWC", "OHWI", "NHWC"),
    )
    if self.norm:
      y = normalised(y, (0, 1, 2)) * wide(params["scale"], y)
    return _rectified(self, y + wide(params["bias"], y), see)


@dataclasses.dataclass(frozen=True)
class Dense:
  """A matrix product of all that an example has, a bias, and maybe a ReLU."""

  name: str
  features: int
  relu: bool = True

  def specs(self, x: ShapedLike) -> PyTree:
    """`kernel` and `bias`."""
    inputs = math.prod(x.shape[1:])
    return {
      "kernel": kernel(inputs, self.features, relu=self.relu),
      "bias": Spec((self.features,)),
    }

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """Maps `(batch, ...)` to `(batch, features)`."""
    y = x.reshape(x.shape[0], -1) @ params["kernel"]
    return _rectified(self, y + wide(params["bias"], y), see)


@dataclasses.dataclass(frozen=True)
class MaxPool:
  """The maximum over windows.

  Args:
    name: of the layer.
    window: height and width.
    stride: in both directions.
    padding: before and after.
    ceil: whether there is a last window that is not full.
  """

  name: str
  window: int
  stride: int = 2
  padding: int = 0
  ceil: bool = False

  def specs(self, x: ShapedLike) -> PyTree:
    """None."""
    return {}

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """Maps `(batch, height, width, channels)` to fewer places."""
    y = lax.reduce_window(
      x,
      -jnp.inf,
      lax.max,
      (1, self.window, self.window, 1),
      (1, self.stride, self.stride, 1),
      ((0, 0), *map(self._pads, x.shape[1:3]), (0, 0)),
    )
    see(self.name, y)
    return y

  def _pads(self, length: int) -> tuple[int, int]:
    left = (length + 2 * self.padding - self.window) % self.stride
    more = self.stride - left if self.ceil and left else 0
    return self.padding, self.padding + more


@dataclasses.dataclass(frozen=True)
class MeanPool:
  """The mean over a place and its neighbours that are in the image."""

  name: str
  window: int = 3

  def specs(self, x: ShapedLike) -> PyTree:
    """None."""
    return {}

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """Maps `(batch, height, width, channels)` to the same shape."""
    y = self._sum(x) / self._sum(jnp.ones((1, *x.shape[1:3], 1)))
    see(self.name, y)
    return y

  def _sum(self, x: Array) -> Array:
    window = (1, self.window, self.window, 1)
    return lax.reduce_window(x, 0.0, lax.add, window, (1,) * 4, "SAME")


@dataclasses.dataclass(frozen=True)
class Call:
  """A function without parameters."""

  name: str
  fn: Callable[[Array], Array]

  def specs(self, x: ShapedLike) -> PyTree:
    """None."""
    return {}

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """The function's value."""
    return self.fn(x)


def mean(x: Array) -> Array:
  """The mean over all places."""
  return x.mean((1, 2))


MEAN = Call("mean", mean)
"""Maps `(batch, height, width, channels)` to `(batch, channels)`."""


@dataclasses.dataclass(frozen=True)
class Chain:
  """Layers one after the other."""

  name: str
  layers: tuple[Layer, ...]

  def specs(self, x: ShapedLike) -> PyTree:
    """Those of each layer by its name."""
    specs = {}
    for layer in self.layers:
      specs[layer.name] = layer.specs(x)
      x = after(layer, x)
    return specs

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """The last layer's output."""
    for layer in self.layers:
      x = layer(params[layer.name], x, see)
    return x


@dataclasses.dataclass(frozen=True)
class Join:
  """Layers side by side, their channels one after the other."""

  name: str
  branches: tuple[Layer, ...]

  def specs(self, x: ShapedLike) -> PyTree:
    """Those of each branch by its name."""
    return {b.name: b.specs(x) for b in self.branches}

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """All channels of all branches."""
    outputs = [b(params[b.name], x, see) for b in self.branches]
    return jnp.concatenate(outputs, axis=-1)


@dataclasses.dataclass(frozen=True)
class Add:
  """The sum of a body and what goes around it.

  Args:
    name: of the layer.
    body: makes the input's shape, or the shortcut's.
    shortcut: around it; None is the input itself.
    relu: whether a ReLU follows.
  """

  name: str
  body: Layer
  shortcut: Layer | None = None
  relu: bool = True

  def specs(self, x: ShapedLike) -> PyTree:
    """Those of each branch by its name."""
    return {b.name: b.specs(x) for b in self._branches()}

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """The sum."""
    y, *around = (b(params[b.name], x, see) for b in self._branches())
    return _rectified(self, y + (around[0] if around else x), see)

  def _branches(self) -> tuple[Layer, ...]:
    return (self.body, self.shortcut) if self.shortcut else (self.body,)


def _rectified(layer: Conv | Dense | Add, y: Array, see: See) -> Array:
  if not layer.relu:
    return y
  y = nn.relu(y)
  see(layer.name, y)
  return y


def normalised(x: Array, axes: tuple[int, ...]) -> Array:
  """Mean 0 and variance 1 over `axes`."""
  centred = x - x.mean(axes, keepdims=True)
  variance = jnp.square(centred).mean(axes, keepdims=True)
  return centred * lax.rsqrt(variance + 1e-5)


def wide(vector: Array, y: Array) -> Array:
  """A value for each channel of `y`."""
  return vector.reshape((1,) * (y.ndim - 1) + vector.shape)


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
  return (size, size) if isinstance(size, int) else size
