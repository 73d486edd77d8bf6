"""GPT decoder: embeddings, one block that repeats, logits."""

import dataclasses

import jax
from jax import nn

from experiments.models import network
from experiments.models.layers import (
  Add,
  Call,
  Chain,
  Layer,
  ParamSpec,
  See,
  WithoutParams,
  kernel_spec,
  normalize,
  per_channel,
  skip_output,
)
from jaxmotion import core
from jaxmotion.core import Array, PyTree, ShapedLike


@core.declare(layers=core.integer(1), heads=core.integer(1))
def gpt(
  *,
  layers: int = 24,
  length: int = 1024,
  heads: int = 16,
  classes: int = 256,
  width: float = 1.0,
) -> network.Network:
  """Returns a decoder with layer norm before each part, as in GPT-2."""
  # At the defaults it is GPT-2 medium over bytes. Unlike in GPT-2, the kernel
  # of the logits is not that of the embedding.
  (channels,) = network.scale_widths((1024,), width)
  if channels % heads:
    raise ValueError(f"`heads` must divide {channels} channels, got {heads}.")
  logits = Chain("logits", (Norm("norm"), Project("out", classes, bias=False)))
  stages = (
    network.Stage("embed", Embed("embed", classes, channels)),
    network.Stage("blocks", _make_block(channels, heads), layers),
    network.Stage("logits", logits),
  )
  tokens = jax.ShapeDtypeStruct((length,), "int32")
  return network.Network("gpt", stages, tokens, tokens)


@dataclasses.dataclass(frozen=True)
class Embed:
  """The sum of a token embedding and a position embedding."""

  name: str
  tokens: int
  features: int

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns `tokens` and `places`."""
    counts = {"tokens": self.tokens, "places": x.shape[1]}
    return {
      name: ParamSpec((count, self.features), deviation=0.02)
      for name, count in counts.items()
    }

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Maps int32 `(batch, length)` to `(batch, length, features)`."""
    return params["tokens"][x] + params["places"][None]


@dataclasses.dataclass(frozen=True)
class Norm:
  """Layer norm over the channels."""

  name: str

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns `scale` and `bias`."""
    return {
      "scale": ParamSpec(x.shape[-1:], 1.0),
      "bias": ParamSpec(x.shape[-1:]),
    }

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Maps `(..., channels)` to the same shape."""
    y = normalize(x, (-1,)) * per_channel(params["scale"], x)
    return y + per_channel(params["bias"], x)


@dataclasses.dataclass(frozen=True)
class Project:
  """A matmul over the channels, and optionally a bias."""

  name: str
  features: int
  bias: bool = True

  def specs(self, x: ShapedLike) -> PyTree:
    """Returns `kernel` and, if asked for, `bias`."""
    specs = {"kernel": kernel_spec(x.shape[-1], self.features)}
    return specs | {"bias": ParamSpec((self.features,))} if self.bias else specs

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Maps `(..., channels)` to `(..., features)`."""
    y = x @ params["kernel"]
    return y + per_channel(params["bias"], y) if self.bias else y


@dataclasses.dataclass(frozen=True)
class Attend(WithoutParams):
  """Causal attention; queries, keys and values are joined along channels."""

  name: str
  heads: int

  def __call__(self, params: PyTree, x: Array, see: See = skip_output) -> Array:
    """Maps `(batch, length, 3 channels)` to `(batch, length, channels)`."""
    batch, length, channels = x.shape
    parts = x.reshape(batch, length, 3, self.heads, -1)
    q, k, v = (parts[:, :, i] for i in range(3))
    y = nn.dot_product_attention(q, k, v, is_causal=True)
    return y.reshape(batch, length, channels // 3)


def _make_block(channels: int, heads: int) -> Chain:
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
