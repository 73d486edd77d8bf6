"""Labeled images: scikit-learn's and those of files; batches of them."""

import functools
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

from experiments.common.console import JobError
from experiments.data import image_files
from experiments.data.labels import ImageData, Images

_SPLIT_SEED = 0  # The held-out images are the same for every run and seed.


def load_images(config: ConfigDict) -> ImageData:
  """Reads the images that a configuration names."""
  match config.data:
    case "digits":
      return load_digits()
    case "photographs":
      return load_photographs()
    case "cifar10":
      return image_files.load_cifar10(Path(config.data_dir))
    case "imagefolder":
      return image_files.load_image_folder(
        Path(config.data_dir), config.image_size
      )
  raise JobError(
    "`config.data` must be one of digits, photographs, cifar10, imagefolder"
    f" for an image model, got {config.data!r}."
  )


def load_digits() -> ImageData:
  """Reads scikit-learn's 1797 digits of 8 x 8 pixels; holds out a third."""
  from sklearn import datasets  # Takes 1.5 s to import.

  pixels, labels = datasets.load_digits(return_X_y=True)
  # The file stores 17 gray levels, 0..16; bytes hold 0..255 everywhere here.
  pixels = np.minimum(pixels * 16, 255).astype(np.uint8).reshape(-1, 8, 8, 1)
  order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
  images = Images(pixels[order], labels[order].astype(np.int32))
  held_out = len(labels) // 3
  test = Images(*(x[:held_out] for x in images))
  train = Images(*(x[held_out:] for x in images))
  return ImageData(train, test, classes=10)


def load_photographs() -> ImageData:
  """Cuts scikit-learn's two photographs into crops, each at four rotations."""
  # The label is the photograph of a crop and its rotation. Each photograph is
  # divided into squares of twice the crop's size. A random third of the squares
  # is held out. Crops stay within a square, so that no pixel is in both halves
  # of the split.
  from sklearn import datasets  # Takes 1.5 s to import.

  size, stride = 32, 8
  random = np.random.default_rng(_SPLIT_SEED)
  split: tuple[list, list] = ([], [])  # Train, test: (crops, label).
  for photograph, pixels in enumerate(datasets.load_sample_images().images):
    squares = _cut_crops(pixels, 2 * size, 2 * size)
    held_out = random.permutation(len(squares)) < len(squares) // 3
    for square, out in zip(squares, held_out, strict=True):
      crops = np.stack(_cut_crops(square, size, stride))
      for turn in range(4):
        turned = np.rot90(crops, turn, axes=(1, 2))
        split[int(out)].append((turned, 4 * photograph + turn))
  train, test = (_label_crops(side) for side in split)
  return ImageData(train, test, classes=8)


def resize_images(data: ImageData, size: int) -> ImageData:
  """Returns the images at another size."""
  return data._replace(
    train=_resize_pixels(data.train, size), test=_resize_pixels(data.test, size)
  )


def batch_indices(count: int, size: int, seed: int, step: int) -> np.ndarray:
  """Returns the examples of one step: a pure function of its arguments."""
  # Every epoch is one permutation drawn from `(seed, epoch)`, cut into whole
  # batches, so a run that is killed and resumed sees the same batches.
  if not 0 < size <= count:
    raise JobError(
      f"`size` must be between 1 and the {count} examples there are, got"
      f" {size}."
    )
  epoch, batch = divmod(step, count // size)
  return _draw_permutation(count, seed, epoch)[
    batch * size : (batch + 1) * size
  ]


@functools.lru_cache(maxsize=4)
def _draw_permutation(count: int, seed: int, epoch: int) -> np.ndarray:
  return np.random.default_rng([seed, epoch]).permutation(count)


def _cut_crops(pixels: np.ndarray, size: int, stride: int) -> list[np.ndarray]:
  height, width = pixels.shape[:2]
  return [
    pixels[i : i + size, j : j + size]
    for i in range(0, height - size + 1, stride)
    for j in range(0, width - size + 1, stride)
  ]


def _label_crops(parts: list[tuple[np.ndarray, int]]) -> Images:
  labels = [np.full(len(crops), label, np.int32) for crops, label in parts]
  pixels = np.concatenate([crops for crops, _ in parts])
  return Images(pixels, np.concatenate(labels))


def _resize_pixels(images: Images, size: int) -> Images:
  count, height, width, channels = images.pixels.shape
  if (height, width) == (size, size):
    return images
  pixels = np.empty((count, size, size, channels), np.uint8)
  for i, j in np.ndindex(count, channels):
    plane = Image.fromarray(images.pixels[i, :, :, j])
    bigger = plane.resize((size, size), Image.Resampling.BILINEAR)
    pixels[i, :, :, j] = np.asarray(bigger)
  return images._replace(pixels=pixels)
