"""Training on scikit-learn's digits by any optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from experiments.models.initial import draw_kernel

SPLIT = 1200


@functools.cache
def digits():
  pixels, labels = load_digits(return_X_y=True)
  order = np.random.default_rng(0).permutation(len(labels))
  return jnp.asarray(pixels[order] / 16, jnp.float32), jnp.asarray(
    labels[order]
  )


def make_perceptron(seed):
  rngs = nnx.Rngs(seed)
  sizes = (64, 128, 128, 10)
  layers = []
  for i in range(3):
    layers += [
      nnx.Linear(sizes[i], sizes[i + 1], kernel_init=draw_kernel(), rngs=rngs),
      nnx.relu,
    ]
  return nnx.Sequential(*layers[:-1])


def learn_digits(tx, steps=400, batch=128):
  """Returns test accuracy and last loss of two seeds, each float[2]."""
  x, y = digits()

  def loss_fn(params, i):
    logits = nnx.merge(graph, params)(x[i])
    return optax.softmax_cross_entropy_with_integer_labels(logits, y[i]).mean()

  def step(carry, i):
    params, state = carry
    loss, grads = jax.value_and_grad(loss_fn)(params, i)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), loss

  def run(params, indices):
    carry = params, tx.init(params)
    (params, _), losses = jax.lax.scan(step, carry, indices)
    right = nnx.merge(graph, params)(x[SPLIT:]).argmax(-1) == y[SPLIT:]
    return right.mean(), losses[-20:].mean()

  run = jax.jit(run)
  found = []
  for seed in range(2):
    graph, params = nnx.split(make_perceptron(seed))
    rng = np.random.default_rng(seed)
    order = np.stack([rng.choice(SPLIT, batch, False) for _ in range(steps)])
    found.append([float(a) for a in run(params, order)])
  return np.array(found).T
