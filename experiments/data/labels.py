"""Labeled images, and the checks that every reader of them makes."""

import hashlib
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from experiments.common.files import FileError


def is_held_out(path: PurePath, share: int) -> bool:
  """Returns whether a path hashes into the lowest of 256 parts."""
  return hashlib.sha256(path.as_posix().encode()).digest()[0] < share


class Images(NamedTuple):
  """Pixels of images and their labels."""

  pixels: np.ndarray  # uint8 `(count, height, width, channels)`.
  labels: np.ndarray  # int32 `(count,)`.


class ImageData(NamedTuple):
  """One fixed split of labeled images."""

  train: Images  # Images to train on.
  test: Images  # Images that are held out.
  classes: int  # Number of labels.


def make_images(
  name: str, pixels: np.ndarray, labels: np.ndarray, classes: int
) -> Images:
  """Returns images whose pixels and labels have been checked."""
  if pixels.dtype != np.uint8 or pixels.ndim != 4:
    raise FileError(
      f"pixels of {name} must be uint8 (count, height, width, channels), from"
      f" 0 to 255, got {pixels.dtype} {pixels.shape}."
    )
  if 0 in pixels.shape or pixels.shape[3] not in (1, 3):
    raise FileError(
      f"pixels of {name} must be at least one image with 1 or 3 channels, got"
      f" {pixels.shape}."
    )
  count = len(pixels)
  is_integer = np.issubdtype(labels.dtype, np.integer)
  if not is_integer or labels.shape not in ((count,), (count, 1)):
    raise FileError(
      f"labels of {name} must be an integer for each of its {count} images, got"
      f" {labels.dtype} {labels.shape}."
    )
  low, high = int(labels.min()), int(labels.max())
  if low < 0 or high >= classes:
    raise FileError(
      f"labels of {name} must be from 0 to {classes - 1}, got {low} to {high}."
    )
  return Images(pixels, labels.reshape(-1).astype(np.int32))


def make_data(
  name: str, train: Images, test: Images, classes: int
) -> ImageData:
  """Returns a split whose halves have images of one shape."""
  shapes = [images.pixels.shape[1:] for images in (train, test)]
  if shapes[0] != shapes[1]:
    raise FileError(
      f"images of {name} must have one shape, got {shapes[0]} to train on and"
      f" {shapes[1]} held out."
    )
  return ImageData(train, test, classes)
