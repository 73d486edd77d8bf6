"""Labeled images: scikit-learn's, CIFAR-10 files and folders of classes."""

import functools
import hashlib
import pathlib
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict
from PIL import Image

_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + 3 * 32 * 32
_IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
_SPLIT_SEED = 0  # The held-out images are the same for every run and seed.


class Images(NamedTuple):
  """Pixels of images and their labels.

  Attributes:
    pixels: uint8 `(count, height, width, channels)`.
    labels: int32 `(count,)`.
  """

  pixels: np.ndarray
  labels: np.ndarray


class ImageData(NamedTuple):
  """One fixed split of labeled images.

  Attributes:
    train: images to train on.
    test: images that are held out.
    classes: number of labels.
  """

  train: Images
  test: Images
  classes: int


def load_images(config: ConfigDict) -> ImageData:
  """Reads the images that a configuration names.

  Args:
    config: with `data` (`digits`, `photographs`, `cifar10` or
      `imagefolder`), `data_dir` and, for `imagefolder`, `image_size` in
      pixels.

  Returns:
    The split of the images.

  Raises:
    ValueError: `config.data` is not one of the four.
    FileNotFoundError: a file or folder is missing; the message names it.
  """
  match config.data:
    case "digits":
      return load_digits()
    case "photographs":
      return load_photographs()
    case "cifar10":
      return load_cifar10(pathlib.Path(config.data_dir))
    case "imagefolder":
      return load_image_folder(pathlib.Path(config.data_dir), config.image_size)
  raise ValueError(
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


def load_photographs(size: int = 32, stride: int = 8) -> ImageData:
  """Cuts scikit-learn's two photographs into crops, each at four rotations.

  The label is the photograph of a crop and its rotation. Each photograph is
  divided into squares of twice the crop's size. A random third of the squares
  is held out. Crops stay within a square, so that no pixel is in both halves of
  the split.

  Args:
    size: height and width of a crop, pixels.
    stride: pixels between one crop of a square and the next.

  Returns:
    The split of the crops, with 8 classes.
  """
  from sklearn import datasets  # Takes 1.5 s to import.

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
  """Returns the images at another size.

  Args:
    data: images of any size.
    size: new height and width, pixels.
  """
  return data._replace(
    train=_resize_pixels(data.train, size), test=_resize_pixels(data.test, size)
  )


def load_cifar10(folder: pathlib.Path) -> ImageData:
  """Reads CIFAR-10 from its binary files, or from one `.npz` file.

  Args:
    folder: holds `data_batch_*.bin` and `test_batch.bin`, or a single
      `.npz` with `x_train`, `y_train`, `x_test`, `y_test`; the
      `.npz` file itself may be named instead.

  Returns:
    The split that the files define.

  Raises:
    FileNotFoundError: neither form exists.
    ValueError: a file does not have the format of its name.
  """
  if folder.suffix == ".npz":
    return _read_npz(_require_path(folder))
  _require_path(folder)
  archives = sorted(folder.glob("*.npz"))
  if archives:
    return _read_npz(archives[0])
  batches = sorted(folder.glob("data_batch_*.bin"))
  if not batches:
    raise FileNotFoundError(
      "`config.data_dir` must hold data_batch_*.bin or an .npz file, got"
      f" {str(folder)!r} without either."
    )
  parts = [_read_cifar_records(path) for path in batches]
  train = Images(
    *(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
  )
  test = _read_cifar_records(_require_path(folder / "test_batch.bin"))
  return ImageData(train, test, classes=10)


def load_image_folder(folder: pathlib.Path, size: int) -> ImageData:
  """Reads a tree with one folder of images for each class, resized to a square.

  Two layouts are read: `train/CLASS/*` beside `val/CLASS/*` (or
  `test/CLASS/*`), and plain `CLASS/*`, of which the files whose path
  hashes into the lowest fifth are held out.

  Args:
    folder: the root of the tree.
    size: height and width after resizing, in pixels.

  Returns:
    The split of the images; labels number the class folders in sorted order.

  Raises:
    FileNotFoundError: a folder is missing or holds no images.
  """
  _require_path(folder)
  held_out = [folder / n for n in ("val", "test") if (folder / n).is_dir()]
  if (folder / "train").is_dir():
    if not held_out:
      raise FileNotFoundError(
        "`config.data_dir` must hold val/ or test/ beside train/, got"
        f" {str(folder)!r} without either."
      )
    train, test = _list_images(folder / "train"), _list_images(held_out[0])
  else:
    files = _list_images(folder)
    test = [f for f in files if _is_held_out(f[0].relative_to(folder))]
    train = [f for f in files if f not in test]
  classes = sorted({name for _, name in train} | {name for _, name in test})
  _require_some(train, "train", folder)
  _require_some(test, "test", folder)
  return ImageData(
    _read_images(train, classes, size),
    _read_images(test, classes, size),
    len(classes),
  )


def batch_indices(count: int, size: int, seed: int, step: int) -> np.ndarray:
  """Returns the examples of one step: a pure function of its arguments.

  Every epoch is one permutation drawn from `(seed, epoch)`, cut into whole
  batches, so a run that is killed and resumed sees the same batches.

  Args:
    count: number of examples in all.
    size: number of examples in a batch, at most `count`.
    seed: seed of the run.
    step: step of the run, from 0.

  Returns:
    int64 indices `(size,)`, distinct.
  """
  if not 0 < size <= count:
    raise ValueError(
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


def _require_path(path: pathlib.Path) -> pathlib.Path:
  if str(path) == "." or not path.exists():
    raise FileNotFoundError(
      f"`config.data_dir` must lead to existing data, got {str(path)!r}, which"
      " is not there."
    )
  return path


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


def _read_cifar_records(path: pathlib.Path) -> Images:
  raw = np.fromfile(path, np.uint8)
  if raw.size == 0 or raw.size % _CIFAR_RECORD:
    raise ValueError(
      f"`{path.name}` must be whole records of {_CIFAR_RECORD} bytes, got"
      f" {raw.size} bytes."
    )
  records = raw.reshape(-1, _CIFAR_RECORD)
  pixels = records[:, 1:].reshape(-1, *_CIFAR_SHAPE).transpose(0, 2, 3, 1)
  return Images(pixels, records[:, 0].astype(np.int32))


def _read_npz(path: pathlib.Path) -> ImageData:
  names = ("x_train", "y_train", "x_test", "y_test")
  with np.load(path) as arrays:
    missing = [name for name in names if name not in arrays]
    if missing:
      raise ValueError(
        f"`{path.name}` must hold {', '.join(names)}, got no"
        f" {', '.join(missing)}."
      )
    x_train, y_train, x_test, y_test = (arrays[name] for name in names)
  train = Images(x_train, y_train.reshape(-1).astype(np.int32))
  test = Images(x_test, y_test.reshape(-1).astype(np.int32))
  return ImageData(train, test, classes=10)


def _list_images(folder: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
  """Returns image files in sorted order, each with its class folder's name."""
  return [
    (path, path.relative_to(folder).parts[0])
    for path in sorted(folder.glob("*/**/*"))
    if path.suffix.lower() in _IMAGE_SUFFIXES
  ]


def _is_held_out(path: pathlib.PurePath) -> bool:
  digest = hashlib.sha256(path.as_posix().encode()).digest()
  return digest[0] < 256 // 5


def _require_some(files: list, split: str, folder: pathlib.Path) -> None:
  if not files:
    raise FileNotFoundError(
      "`config.data_dir` must hold class folders of images"
      f" ({', '.join(sorted(_IMAGE_SUFFIXES))}) for the {split} split, got none"
      f" in {str(folder)!r}."
    )


def _read_images(
  files: list[tuple[pathlib.Path, str]], classes: list[str], size: int
) -> Images:
  pixels = np.empty((len(files), size, size, 3), np.uint8)
  for i, (path, _) in enumerate(files):
    with Image.open(path) as image:
      pixels[i] = np.asarray(image.convert("RGB").resize((size, size)))
  labels = np.array([classes.index(name) for _, name in files], np.int32)
  return Images(pixels, labels)
