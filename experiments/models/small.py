"""Small CNN and transformer whose only state is their parameters."""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from experiments.models import initial

_KERNEL = initial.draw_kernel()
_TABLE = initial.draw_table(0.02)


class Cnn(nnx.Module):
  """A CNN of 3 x 3 convolutions with mean pooling, then two dense layers.

  There is no batch norm and no dropout: the parameters are the whole state, so
  the workers exchange all that they share. A few large kernels hold nearly all
  parameters, and large kernels are what codecs compress.
  """

  def __init__(
    self,
    shape: tuple[int, int, int],
    *,
    channels: tuple[int, ...],
    hidden: int,
    classes: int,
    rngs: nnx.Rngs,
  ):
    height, width, inputs = shape
    # Height and width are halved before every convolution but the first.
    shrink = 2 ** (len(channels) - 1)
    if height % shrink or width % shrink:
      raise ValueError(
        f"`shape` must be divisible by {shrink} for {len(channels)}"
        f" convolutions, got {shape}."
      )
    sizes = (inputs, *channels)
    self.convs = nnx.List(
      nnx.Conv(a, b, (3, 3), kernel_init=_KERNEL, rngs=rngs)
      for a, b in itertools.pairwise(sizes)
    )
    features = (height // shrink) * (width // shrink) * channels[-1]
    self.hidden = nnx.Linear(features, hidden, kernel_init=_KERNEL, rngs=rngs)
    self.out = nnx.Linear(hidden, classes, kernel_init=_KERNEL, rngs=rngs)

  def __call__(self, pixels: jax.Array) -> jax.Array:
    """Maps f32 `(batch, height, width, channels)` to class logits."""
    x = pixels
    for i, conv in enumerate(self.convs):
      x = nnx.relu(conv(_halve(x) if i else x))
    x = x.reshape(x.shape[0], -1)
    return self.out(nnx.relu(self.hidden(x)))


def _halve(x: jax.Array) -> jax.Array:
  """Returns 2 x 2 mean pooling, by a reshape: its gradient is a broadcast."""
  batch, height, width, channels = x.shape
  return x.reshape(batch, height // 2, 2, width // 2, 2, channels).mean(
    axis=(2, 4)
  )


class _Block(nnx.Module):
  """A pre-norm transformer block: attention, then a perceptron."""

  def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs):
    self.heads = heads
    self.norm1 = nnx.LayerNorm(width, rngs=rngs)
    self.qkv = nnx.Linear(width, 3 * width, kernel_init=_KERNEL, rngs=rngs)
    self.mix = nnx.Linear(width, width, kernel_init=_KERNEL, rngs=rngs)
    self.norm2 = nnx.LayerNorm(width, rngs=rngs)
    self.up = nnx.Linear(width, 4 * width, kernel_init=_KERNEL, rngs=rngs)
    self.down = nnx.Linear(4 * width, width, kernel_init=_KERNEL, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    batch, length, width = x.shape
    qkv = self.qkv(self.norm1(x))
    qkv = qkv.reshape(batch, length, 3, self.heads, width // self.heads)
    q, k, v = (qkv[:, :, i] for i in range(3))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + self.mix(attended.reshape(batch, length, width))
    return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
  """A transformer decoder over bytes; the output shares the embedding."""

  def __init__(
    self, *, layers: int, width: int, heads: int, context: int, rngs: nnx.Rngs
  ):
    if width % heads:
      raise ValueError(
        f"`width` must be divisible by `heads` = {heads}, got {width}."
      )
    self.bytes = nnx.Embed(256, width, embedding_init=_TABLE, rngs=rngs)
    self.places = nnx.Embed(context, width, embedding_init=_TABLE, rngs=rngs)
    self.blocks = nnx.List(
      _Block(width, heads, rngs=rngs) for _ in range(layers)
    )
    self.norm = nnx.LayerNorm(width, rngs=rngs)

  def __call__(self, text: jax.Array) -> jax.Array:
    """Maps int32 `(batch, length)` to logits `(batch, length, 256)`."""
    places = self.places(jnp.arange(text.shape[1]))
    x = self.bytes(text) + places[None]
    for block in self.blocks:
      x = block(x)
    return self.bytes.attend(self.norm(x))


def build_cnn(
  config: ConfigDict, shape: tuple[int, int, int], classes: int, seed: int
) -> Cnn:
  """Returns the CNN that a configuration describes, initialized from `seed`."""
  return Cnn(
    shape,
    channels=tuple(config.channels),
    hidden=config.hidden,
    classes=classes,
    rngs=nnx.Rngs(seed),
  )


def build_transformer(config: ConfigDict, seed: int) -> Transformer:
  """Returns the transformer that a configuration describes."""
  return Transformer(
    layers=config.layers,
    width=config.width,
    heads=config.heads,
    context=config.context,
    rngs=nnx.Rngs(seed),
  )
