"""Models written out layer by layer, whose steps have many arrays."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax, nn

from jaxmotion.core import Array, PyTree

_TOKENS, _LENGTH, _BATCH = 2048, 64, 8


class Model(NamedTuple):
  """A model by the shapes of its arrays."""

  params: Mapping[str, tuple[int, ...]]
  batch: dict[str, jax.ShapeDtypeStruct]
  apply: Callable[[PyTree, Any], Array]  # Parameters and inputs to logits.

  def loss(self, params: PyTree, batch: PyTree) -> Array:
    """Returns the mean cross entropy."""
    logits = self.apply(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["y"]
    ).mean()


def make_dense(layers: int, width: int = 512) -> Model:
  """Returns dense layers: two arrays each, or a lone matrix for 0 layers."""
  params: dict[str, tuple[int, ...]] = {"head": (width, width)}
  for i in range(layers):
    params |= {f"{i}_kernel": (width, width), f"{i}_bias": (width,)}

  def apply(params: PyTree, x: Array) -> Array:
    for i in range(layers):
      x = nn.gelu(x @ params[f"{i}_kernel"] + params[f"{i}_bias"])
    return x @ params["head"]

  x = jax.ShapeDtypeStruct((_BATCH, width), jnp.float32)
  labels = jax.ShapeDtypeStruct((_BATCH,), jnp.int32)
  return Model(params, {"x": x, "y": labels}, apply)


def make_gpt(layers: int, width: int = 256, experts: int = 0) -> Model:
  """Returns a decoder, in which every token may choose one of the experts."""
  params: dict[str, tuple[int, ...]] = {
    "tokens": (_TOKENS, width),
    "places": (_LENGTH, width),
  }
  for name in (*map(str, range(layers)), "last"):
    params |= {f"{name}_scale": (width,), f"{name}_bias": (width,)}
  for i in range(layers):
    params |= {f"{i}_scale2": (width,), f"{i}_bias2": (width,)}
    kernels = {"qkv": (width, 3 * width), "mix": (width, width)}
    for e in range(max(1, experts)):
      up, down = (width, 4 * width), (4 * width, width)
      kernels |= {f"up{e}": up, f"down{e}": down}
    params |= {f"{i}_{name}": shape for name, shape in kernels.items()}
    params |= {f"{i}_{name}_b": shape[1:] for name, shape in kernels.items()}
    if experts:
      params[f"{i}_router"] = (width, experts)

  def norm(params: PyTree, name: str, x: Array, which: str = "") -> Array:
    y = nn.standardize(x, -1, epsilon=1e-5)
    scale, bias = params[f"{name}_scale{which}"], params[f"{name}_bias{which}"]
    return y * scale + bias

  def dense(params: PyTree, name: str, x: Array) -> Array:
    return x @ params[name] + params[f"{name}_b"]

  def perceptron(params: PyTree, i: int, x: Array) -> Array:
    ys = [
      dense(params, f"{i}_down{e}", nn.gelu(dense(params, f"{i}_up{e}", x)))
      for e in range(max(1, experts))
    ]
    if not experts:
      return ys[0]
    weights = nn.softmax(x @ params[f"{i}_router"])
    return jnp.einsum("e...d,...e->...d", jnp.stack(ys), weights)

  def apply(params: PyTree, x: Array) -> Array:
    x = params["tokens"][x] + params["places"]
    for i in range(layers):
      y = dense(params, f"{i}_qkv", norm(params, str(i), x))
      q, k, v = jnp.split(y.reshape(*y.shape[:2], 12, -1), 3, 2)
      y = nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
      x = x + dense(params, f"{i}_mix", y)
      x = x + perceptron(params, i, norm(params, str(i), x, "2"))
    return norm(params, "last", x) @ params["tokens"].T

  tokens = jax.ShapeDtypeStruct((_BATCH, _LENGTH), jnp.int32)
  return Model(params, {"x": tokens, "y": tokens}, apply)


def make_resnet50(classes: int = 1000) -> Model:
  """Returns ResNet-50: 53 convolutions with a norm each, and a classifier."""
  convs = {"stem": (7, 7, 3, 64)}
  blocks, features = [], 64
  for stage, count in enumerate((3, 4, 6, 3)):
    for i in range(count):
      name, inner = f"{stage}_{i}", 64 * 2**stage
      convs |= {
        f"{name}_a": (1, 1, features, inner),
        f"{name}_b": (3, 3, inner, inner),
        f"{name}_c": (1, 1, inner, 4 * inner),
      }
      if i == 0:
        convs[f"{name}_d"] = (1, 1, features, 4 * inner)
      blocks.append((name, 2 if stage and i == 0 else 1))
      features = 4 * inner
  params: dict[str, tuple[int, ...]] = dict(convs)
  for name, shape in convs.items():
    params |= {f"{name}_scale": shape[3:], f"{name}_bias": shape[3:]}
  params |= {"head": (features, classes), "head_bias": (classes,)}

  def conv(params: PyTree, name: str, x: Array, stride: int = 1) -> Array:
    layout = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(
      x, params[name], (stride, stride), "SAME", dimension_numbers=layout
    )
    y = nn.standardize(y, (0, 1, 2), epsilon=1e-5)
    return y * params[f"{name}_scale"] + params[f"{name}_bias"]

  def apply(params: PyTree, x: Array) -> Array:
    x = nn.relu(conv(params, "stem", x, 4))
    for name, stride in blocks:
      y = nn.relu(conv(params, f"{name}_a", x))
      y = nn.relu(conv(params, f"{name}_b", y, stride))
      if f"{name}_d" in params:
        x = conv(params, f"{name}_d", x, stride)
      x = nn.relu(x + conv(params, f"{name}_c", y))
    return x.mean((1, 2)) @ params["head"] + params["head_bias"]

  images = jax.ShapeDtypeStruct((_BATCH, 64, 64, 3), jnp.float32)
  labels = jax.ShapeDtypeStruct((_BATCH,), jnp.int32)
  return Model(params, {"x": images, "y": labels}, apply)


MODELS: dict[str, Callable[[], Model]] = {
  "matrix": lambda: make_dense(0),
  "dense_33": lambda: make_dense(16),
  "gpt_148": lambda: make_gpt(12),
  "experts_168": lambda: make_gpt(4, experts=8),
  "resnet50_161": make_resnet50,
  "gpt_580": lambda: make_gpt(48, 128),
}
"""Makes a model, by its name and the number of its arrays."""
