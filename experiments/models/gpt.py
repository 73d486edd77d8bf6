"""A decoder: embeddings, one block that repeats, logits."""

import dataclasses

import jax
from jax import nn

from experiments.models.classic import scaled
from experiments.models.layers import (
  Add,
  Call,
  Chain,
  Layer,
  See,
  Spec,
  ignore,
  kernel,
  normalised,
  wide,
)
from experiments.models.network import Network, Stage
from jaxmotion.core import Array, PyTree, ShapedLike, check_int


def gpt(
  *,
  layers: int = 24,
  length: int = 1024,
  heads: int = 16,
  classes: int = 256,
  width: float = 1.0,
) -> Network:
  """A decoder with normalisation before each part, as GPT-2 has.

  At the defaults it is GPT-2 medium over bytes. Unlike GPT-2's, the logits have
  a kernel of their own.

  Args:
    layers: blocks.
    length: tokens of an example.
    heads: of attention.
    classes: how many tokens there are; GPT-2 has 50257.
    width: what the 1024 channels are multiplied by.

  Raises:
    ValueError: the heads do not divide the channels.
  """
  check_int("layers", layers, 1)
  check_int("heads", heads, 1)
  (channels,) = scaled((1024,), width)
  if channels % heads:
    raise ValueError(f"`heads` must divide {channels} channels, got {heads}.")
  logits = Chain("logits", (Norm("norm"), Project("out", classes, bias=False)))
  stages = (
    Stage("embed", Embed("embed", classes, channels)),
    Stage("blocks", _block(channels, heads), layers),
    Stage("logits", logits),
  )
  tokens = jax.ShapeDtypeStruct((length,), "int32")
  return Network("gpt", stages, tokens, tokens)


@dataclasses.dataclass(frozen=True)
class Embed:
  """A vector for each token and one for its place."""

  name: str
  tokens: int
  features: int

  def specs(self, x: ShapedLike) -> PyTree:
    """`tokens` and `places`."""
    counts = {"tokens": self.tokens, "places": x.shape[1]}
    return {
      name: Spec((count, self.features), deviation=0.02)
      for name, count in counts.items()
    }

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """Maps int32 `(batch, length)` to `(batch, length, features)`."""
    return params["tokens"][x] + params["places"][None]


@dataclasses.dataclass(frozen=True)
class Norm:
  """Layer norm over channels."""

  name: str

  def specs(self, x: ShapedLike) -> PyTree:
    """`scale` and `bias`."""
    return {"scale": Spec(x.shape[-1:], 1.0), "bias": Spec(x.shape[-1:])}

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """Maps `(..., channels)` to the same shape."""
    y = normalised(x, (-1,)) * wide(params["scale"], x)
    return y + wide(params["bias"], x)


@dataclasses.dataclass(frozen=True)
class Project:
  """A matrix product over channels, and maybe a bias."""

  name: str
  features: int
  bias: bool = True

  def specs(self, x: ShapedLike) -> PyTree:
    """`kernel` and maybe `bias`."""
    specs = {"kernel": kernel(x.shape[-1], self.features)}
    return specs | {"bias": Spec((self.features,))} if self.bias else specs

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """Maps `(..., channels)` to `(..., features)`."""
    y = x @ params["kernel"]
    return y + wide(params["bias"], y) if self.bias else y


@dataclasses.dataclass(frozen=True)
class Attend:
  """Causal attention of queries, keys and values that lie side by side."""

  name: str
  heads: int

  def specs(self, x: ShapedLike) -> PyTree:
    """None."""
    return {}

  def __call__(self, params: PyTree, x: Array, see: See = ignore) -> Array:
    """Maps `(batch, length, 3 channels)` to `(batch, length, channels)`."""
    batch, length, channels = x.shape
    parts = x.reshape(batch, length, 3, self.heads, -1)
    q, k, v = (parts[:, :, i] for i in range(3))
    y = nn.dot_product_attention(q, k, v, is_causal=True)
    return y.reshape(batch, length, channels // 3)


def _block(channels: int, heads: int) -> Chain:
  attention: tuple[Layer, ...] = (
    Norm("norm"),
    Project("qkv", 3 * channels),
    Attend("attend", heads),
    Project("mix", channels),
  )
  perceptron: tuple[Layer, ...] = (
    Norm("norm"),
    Project("up", 4 * channels),
    Call("gelu", nn.gelu),
    Project("down", channels),
  )
  return Chain(
    "block",
    (
      Add("attention", Chain("body", attention), relu=False),
      Add("perceptron", Chain("body", perceptron), relu=False),
    ),
  )
