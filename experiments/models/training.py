"""Images, batches and the optimizer that train small forms of the networks."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from experiments.data.images import batch_indices, load_images, resize_images
from experiments.data.labels import ImageData, Images
from jaxmotion.core import Array

NARROW_WIDTHS = {
  "alexnet": 0.25,
  "vgg16": 0.125,
  "googlenet": 0.125,
  "squeezenet": 0.25,
  "nin": 0.25,
}
"""Width factors of networks that are small enough to train on a CPU."""

_PEAK_RATE = 1e-3


def load_sized_images(config: ConfigDict, size: int) -> ImageData:
  """Loads the images of a configuration, `size` pixels high and wide."""
  return resize_images(load_images(config), size)


def load_color_images(data: str, size: int) -> ImageData:
  """Loads images with three channels, in a fixed random order."""
  images = load_sized_images(ConfigDict({"data": data}), size)
  train, test = (_shuffle_images(_add_channels(part)) for part in images[:2])
  return images._replace(train=train, test=test)


def _add_channels(images: Images) -> Images:
  """Returns the images with three channels; gray ones get equal channels."""
  *shape, channels = images.pixels.shape
  pixels = np.broadcast_to(
    images.pixels, (*shape, 3 if channels == 1 else channels)
  )
  return images._replace(pixels=pixels)


def _shuffle_images(images: Images) -> Images:
  """Returns the images in a fixed random order."""
  order = np.random.default_rng(0).permutation(len(images.labels))
  return Images(*(x[order] for x in images))


def make_optimizer(steps: int) -> optax.GradientTransformation:
  """Returns Adam whose rate rises for a tenth of the steps, then falls to 0."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.0, _PEAK_RATE, max(1, steps // 10), steps
  )
  return optax.adam(schedule)


def select_batch(images: Images, chosen: np.ndarray) -> tuple[Array, Array]:
  """Returns some of the images, scaled to -1 to 1, and their labels."""
  # `chosen`: int[batch], indices of the images.
  pixels = images.pixels[chosen].astype(np.float32) / 127.5 - 1
  return jnp.asarray(pixels), jnp.asarray(images.labels[chosen])


def make_batches(
  images: Images, size: int, seed: int
) -> Callable[[int], tuple[Array, Array]]:
  """Returns a function that returns the batch of a step, counted from 0."""
  count = len(images.labels)
  return lambda step: select_batch(
    images, batch_indices(count, size, seed, step)
  )
