"""Trains a network and stops now and then to look at its activations."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments import _data, networks
from jaxmotion.core import Array, PyTree

WIDTHS = {
  "alexnet": 0.25,
  "vgg16": 0.125,
  "googlenet": 0.25,
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


def load(data: str, size: int) -> _data.ImageData:
  """Images of three channels.

  Args:
    data: `digits` or `photographs`.
    size: height and width in pixels.
  """
  images = _data.load_images(ConfigDict({"data": data}))
  train, test = (
    _mixed(_coloured(part)) for part in _data.resized(images, size)[:2]
  )
  return images._replace(train=train, test=test)


def train(
  net: networks.Network,
  images: _data.ImageData,
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
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, _PEAK, max(1, last // 10), last
  )
  optimizer = optax.adam(schedule)
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
      chosen = _data.batch_indices(count, batch, seed, step)
      params, state, loss = update(params, state, _batch(images.train, chosen))
      on_step(step + 1, float(loss))


class _Looks:
  """Looks at always the same images."""

  def __init__(
    self, net: networks.Network, images: _data.ImageData, batch: int
  ):
    self._images = images
    self._size = batch
    self._activations = jax.jit(net.activations)

    @jax.jit
    def hits(params: PyTree, batch: tuple[Array, Array]) -> Array:
      return jnp.sum(net.apply(params, batch[0]).argmax(-1) == batch[1])

    self._hits = hits
    self._loss = jax.jit(net.loss)

  def __call__(self, step: int, params: PyTree) -> Look:
    batches = list(self._batches(params))
    first = np.arange(self._size)
    held_out = _batch(self._images.test, first)
    calibration = _batch(self._images.train, first)
    return Look(
      step,
      float(self._loss(params, held_out)),
      100 * sum(batches) / (len(batches) * self._size),
      self._seen(params, calibration[0]),
      self._seen(params, held_out[0]),
    )

  def _batches(self, params: PyTree) -> Iterator[int]:
    """Hits of each whole batch of held-out images."""
    count = min(_SCORED, len(self._images.test.labels))
    for start in range(0, count - self._size + 1, self._size):
      chosen = np.arange(start, start + self._size)
      yield int(self._hits(params, _batch(self._images.test, chosen)))

  def _seen(self, params: PyTree, x: Array) -> dict[str, np.ndarray]:
    seen = self._activations(params, x)
    return {name: np.asarray(y) for name, y in seen.items()}


def _batch(images: _data.Images, chosen: np.ndarray) -> tuple[Array, Array]:
  pixels = images.pixels[chosen].astype(np.float32) / 127.5 - 1
  return jnp.asarray(pixels), jnp.asarray(images.labels[chosen])


def _coloured(images: _data.Images) -> _data.Images:
  """Grey images get three equal channels."""
  *shape, channels = images.pixels.shape
  pixels = np.broadcast_to(
    images.pixels, (*shape, 3 if channels == 1 else channels)
  )
  return images._replace(pixels=pixels)


def _mixed(images: _data.Images) -> _data.Images:
  """In an order where neighbours have nothing to do with each other."""
  order = np.random.default_rng(0).permutation(len(images.labels))
  return _data.Images(*(x[order] for x in images))
