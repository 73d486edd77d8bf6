"""Trains a network and stops now and then to look at its activations."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments import models
from experiments.data.images import (
  ImageData,
  Images,
  batch_indices,
  load_images,
  resize_images,
)
from jaxmotion.core import Array, PyTree

WIDTHS = {
  "alexnet": 0.25,
  "vgg16": 0.125,
  "googlenet": 0.125,
  "squeezenet": 0.25,
  "nin": 0.25,
}
"""The networks, and what share of their channels is trained."""
_PEAK = 1e-3  # Of the learning rate.
_SCORED = 1024  # Held-out images, at most.
_LOOKED_AT = 32  # Images of a look, at most.


class Look(NamedTuple):
  """What a network does after some steps.

  Attributes:
    step: how many.
    loss: mean of the batch that is looked at, in nats.
    accuracy: of up to 1024 held-out images, in per cent.
    calibration: activations of a batch of training images, by name.
    held_out: of as many held-out images.
  """

  step: int
  loss: float
  accuracy: float
  calibration: dict[str, np.ndarray]
  held_out: dict[str, np.ndarray]


def load(data: str, size: int) -> ImageData:
  """Images of three channels.

  Args:
    data: `digits` or `photographs`.
    size: height and width in pixels.
  """
  images = load_images(ConfigDict({"data": data}))
  train, test = (
    _mixed(_coloured(part)) for part in resize_images(images, size)[:2]
  )
  return images._replace(train=train, test=test)


def train(
  net: models.Network,
  images: ImageData,
  *,
  steps: Sequence[int],
  batch: int,
  seed: int,
  on_step: Callable[[int, float], None],
) -> Iterator[Look]:
  """Trains with Adam and yields a look at each of some steps.

  Args:
    net: what is trained.
    images: to train on.
    steps: when to look; the last one ends it.
    batch: images of a step; a look has as many, up to 32.
    seed: of the parameters and the batches.
    on_step: is called with each step and its loss.
  """
  last = steps[-1]
  optimizer = make_optimizer(last)
  params = jax.jit(net.init)(jax.random.key(seed))
  state = optimizer.init(params)

  @jax.jit
  def update(
    params: PyTree, state: PyTree, batch: tuple[Array, Array]
  ) -> tuple:
    loss, grads = jax.value_and_grad(net.loss)(params, batch)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  look = _Looks(net, images, min(batch, _LOOKED_AT))
  for step in range(last + 1):
    if step in steps:
      yield look(step, params)
    if step < last:
      count = len(images.train.labels)
      chosen = batch_indices(count, batch, seed, step)
      params, state, loss = update(
        params, state, to_batch(images.train, chosen)
      )
      on_step(step + 1, float(loss))


def make_optimizer(steps: int) -> optax.GradientTransformation:
  """Adam whose rate rises for a tenth of the steps and then falls to zero."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, _PEAK, max(1, steps // 10), steps
  )
  return optax.adam(schedule)


class _Looks:
  """Looks at always the same images."""

  def __init__(self, net: models.Network, images: ImageData, batch: int):
    self._images = images
    self._size = batch

    # One program: what the parts of it share is compiled once.
    @jax.jit
    def run(params: PyTree, batch: tuple[Array, Array]) -> tuple:
      logits = net.apply(params, batch[0])
      hits = jnp.sum(logits.argmax(-1) == batch[1])
      return net.loss(params, batch), hits, net.activations(params, batch[0])

    self._run = run

  def __call__(self, step: int, params: PyTree) -> Look:
    _, _, calibration = self._at(self._images.train, 0, params)
    loss, _, held_out = self._at(self._images.test, 0, params)
    count = min(_SCORED, len(self._images.test.labels)) // self._size
    hits = sum(
      int(self._at(self._images.test, i, params)[1]) for i in range(count)
    )
    accuracy = 100 * hits / (count * self._size)
    seen = (
      {name: np.asarray(y) for name, y in part.items()}
      for part in (calibration, held_out)
    )
    return Look(step, float(loss), accuracy, *seen)

  def _at(self, images: Images, i: int, params: PyTree) -> tuple:
    """(loss, hits, activations) of the i-th batch."""
    chosen = np.arange(i * self._size, (i + 1) * self._size)
    return self._run(params, to_batch(images, chosen))


def to_batch(images: Images, chosen: np.ndarray) -> tuple[Array, Array]:
  """Some of the images, between -1 and 1, and their labels."""
  pixels = images.pixels[chosen].astype(np.float32) / 127.5 - 1
  return jnp.asarray(pixels), jnp.asarray(images.labels[chosen])


def _coloured(images: Images) -> Images:
  """Grey images get three equal channels."""
  *shape, channels = images.pixels.shape
  pixels = np.broadcast_to(
    images.pixels, (*shape, 3 if channels == 1 else channels)
  )
  return images._replace(pixels=pixels)


def _mixed(images: Images) -> Images:
  """In an order where neighbours have nothing to do with each other."""
  order = np.random.default_rng(0).permutation(len(images.labels))
  return Images(*(x[order] for x in images))
