"""Shared parts of the trainers: a loss, and networks of several libraries."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

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
