"""Parts that the trainers share: data, a loss, networks of several libraries.

Trainers are run from the root of the repository, without hardware:

  python -m examples.nnx_loop_compressed
"""

import dataclasses
import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmotion import codecs

HIDDEN, CLASSES = 16, 4


def cross_entropy(logits, labels):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses.mean()


class LinenNetwork(nn.Module):
  """A network of Linen, with or without batch normalization."""

  normalize: bool = False

  @nn.compact
  def __call__(self, x):
    x = nn.Dense(HIDDEN, use_bias=False)(x)
    if self.normalize:
      x = nn.BatchNorm(False, use_scale=False, use_bias=False)(x)
    return nn.Dense(CLASSES, use_bias=False)(nn.relu(x))


class NnxNetwork(nnx.Module):
  """A network of NNX."""

  def __init__(self, features, rngs):
    make = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
    self.first, self.last = make(features, HIDDEN), make(HIDDEN, CLASSES)

  def __call__(self, x):
    return self.last(nnx.relu(self.first(x)))


def init_matrix(seed, inputs, outputs):
  w = np.random.default_rng(seed).normal(size=(inputs, outputs))
  return jnp.asarray(w / inputs**0.5, jnp.float32)


def init_params(features):
  return {
    "first": init_matrix(0, features, HIDDEN),
    "last": init_matrix(1, HIDDEN, CLASSES),
  }


def apply_network(params, x):
  return jax.nn.relu(x @ params["first"]) @ params["last"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ModuleNetwork:
  """A network that is a pytree itself, as those of Equinox are."""

  first: jax.Array
  last: jax.Array

  def __call__(self, x):
    return apply_network({"first": self.first, "last": self.last}, x)


def make_batches(steps):
  """Returns batches of four classes, each around a center of its own."""
  rng = np.random.default_rng(0)
  centers = rng.normal(size=(4, 6)).astype(np.float32)
  batches = []
  for _ in range(steps):
    y = rng.integers(0, 4, 16).astype(np.int32)
    noise = rng.normal(size=(16, 6)).astype(np.float32)
    batches.append({"x": centers[y] + noise / 2, "y": y})
  return batches


def make_config(codec):
  """Returns what a trainer is told; those without compression have no codec."""
  mesh = jax.sharding.Mesh(jax.devices()[:4], ("data",))
  return types.SimpleNamespace(
    features=6, learning_rate=0.1, mesh=mesh, codec=codec
  )


def run_trainer(train, steps=20):
  """Trains on CPU devices that this process emulates, and prints losses.

  On hardware, leave out the two lines that choose the devices.
  """
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", 8)
  codec = codecs.feedback(codecs.uniform(bits=8, block=64))
  _, losses = train(make_batches(steps), make_config(codec))
  for i in range(4, steps, 5):
    print(f"step {i + 1}: loss {losses[i]:.4f}")
