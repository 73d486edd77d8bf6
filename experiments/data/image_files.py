"""Files of labeled images: CIFAR-10 and folders of classes.

Nothing that is read is run as code: pickled arrays are refused. Archives are
read in memory, so that no name in them can lead to a file elsewhere.
"""

import contextlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from experiments.common.files import FileError, MissingFileError
from experiments.data.labels import (
  ImageData,
  Images,
  is_held_out,
  make_data,
  make_images,
)

_CIFAR_CLASSES = 10
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD = 1 + 3 * 32 * 32
_CIFAR_NAMES = ("x_train", "y_train", "x_test", "y_test")
_HELD_OUT_OF_256 = 256 // 5  # A fifth of the files.
_IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
# Other modes have more than 8 bits a channel, and are clipped when converted.
_IMAGE_MODES = frozenset(
  {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
)


def load_cifar10(folder: Path) -> ImageData:
  """Reads CIFAR-10 from its binary files, or from one `.npz` file."""
  # The version with pickled batches is not read, because a pickle can run code.
  if folder.suffix == ".npz":
    return _read_npz(_require_path(folder))
  _require_path(folder)
  archives = sorted(folder.glob("*.npz"))
  if len(archives) > 1:
    names = ", ".join(path.name for path in archives)
    raise FileError(
      f"`config.data_dir` must hold one .npz file or name one, got {names} in"
      f" {str(folder)!r}."
    )
  if archives:
    return _read_npz(archives[0])
  batches = sorted(folder.glob("data_batch_*.bin"))
  if not batches:
    raise MissingFileError(
      "`config.data_dir` must hold data_batch_*.bin or an .npz file, got"
      f" {str(folder)!r} without either."
    )
  parts = [_read_cifar_records(path) for path in batches]
  train = Images(
    *(np.concatenate(arrays) for arrays in zip(*parts, strict=True))
  )
  test = _read_cifar_records(_require_path(folder / "test_batch.bin"))
  return make_data(repr(str(folder)), train, test, _CIFAR_CLASSES)


def load_image_folder(folder: Path, size: int) -> ImageData:
  """Reads a folder of images for each class, resized to squares."""
  # Two layouts are read: `train/CLASS/*` beside `val/CLASS/*` (or
  # `test/CLASS/*`), and plain `CLASS/*`, of which the files whose path hashes
  # into the lowest fifth are held out.
  _require_path(folder)
  held_out = [folder / n for n in ("val", "test") if (folder / n).is_dir()]
  if (folder / "train").is_dir():
    if not held_out:
      raise MissingFileError(
        "`config.data_dir` must hold val/ or test/ beside train/, got"
        f" {str(folder)!r} without either."
      )
    train, test = _list_images(folder / "train"), _list_images(held_out[0])
  else:
    files = _list_images(folder)
    is_test = [
      is_held_out(path.relative_to(folder), _HELD_OUT_OF_256)
      for path, _ in files
    ]
    test = [file for file, out in zip(files, is_test, strict=True) if out]
    train = [file for file, out in zip(files, is_test, strict=True) if not out]
  classes = sorted({name for _, name in train} | {name for _, name in test})
  _require_some(train, "train", folder)
  _require_some(test, "test", folder)
  return ImageData(
    _read_images(train, classes, size),
    _read_images(test, classes, size),
    len(classes),
  )


def _require_path(path: Path) -> Path:
  if str(path) == "." or not path.exists():
    raise MissingFileError(
      f"`config.data_dir` must lead to existing data, got {str(path)!r}, which"
      " is not there."
    )
  return path


@contextlib.contextmanager
def _name_file(path: Path, kind: str) -> Iterator[None]:
  """Turns any error of a decoder into one line that names the file."""
  try:
    yield
  except FileError:
    raise
  # Decoders of broken files raise errors of a dozen types.
  except Exception as error:
    text = " ".join(str(error).split())
    raise FileError(
      f"{str(path)!r} must be {kind}, and cannot be read:"
      f" {type(error).__name__} {text}."
    ) from error


def _read_cifar_records(path: Path) -> Images:
  with _name_file(path, "a file of CIFAR-10 records"):
    raw = np.frombuffer(path.read_bytes(), np.uint8)
  if raw.size == 0 or raw.size % _CIFAR_RECORD:
    raise FileError(
      f"{str(path)!r} must be whole records of {_CIFAR_RECORD} bytes, got"
      f" {raw.size} bytes."
    )
  records = raw.reshape(-1, _CIFAR_RECORD)
  pixels = records[:, 1:].reshape(-1, *_CIFAR_SHAPE).transpose(0, 2, 3, 1)
  return make_images(repr(str(path)), pixels, records[:, 0], _CIFAR_CLASSES)


def _read_npz(path: Path) -> ImageData:
  with _name_file(path, "an .npz archive"), zipfile.ZipFile(path) as archive:
    held = archive.namelist()
    missing = [name for name in _CIFAR_NAMES if f"{name}.npy" not in held]
    if missing:
      raise FileError(
        f"{str(path)!r} must hold {', '.join(_CIFAR_NAMES)}, got no"
        f" {', '.join(missing)}."
      )
    arrays = {name: _read_member(archive, name) for name in _CIFAR_NAMES}
  train, test = (
    make_images(
      f"{split!r} in {str(path)!r}",
      arrays[f"x_{split}"],
      arrays[f"y_{split}"],
      _CIFAR_CLASSES,
    )
    for split in ("train", "test")
  )
  return make_data(repr(str(path)), train, test, _CIFAR_CLASSES)


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
  """Returns an array of an archive, all of whose bytes have been checked."""
  # numpy reads as many bytes as the header of the array asks for, and so misses
  # the checksum at the end of a member whose header asks for fewer.
  stream = io.BytesIO(archive.read(f"{name}.npy"))
  array = np.lib.format.read_array(stream, allow_pickle=False)
  if stream.read(1):
    raise ValueError(f"{name} has more bytes than its shape {array.shape}")
  return array


def _list_images(folder: Path) -> list[tuple[Path, str]]:
  """Returns image files in sorted order, each with its class folder's name."""
  return [
    (path, path.relative_to(folder).parts[0])
    for path in sorted(folder.glob("*/**/*"))
    if path.suffix.lower() in _IMAGE_SUFFIXES
  ]


def _require_some(files: list, split: str, folder: Path) -> None:
  if not files:
    raise MissingFileError(
      "`config.data_dir` must hold class folders of images"
      f" ({', '.join(sorted(_IMAGE_SUFFIXES))}) for the {split} split, got none"
      f" in {str(folder)!r}."
    )


def _read_images(
  files: list[tuple[Path, str]], classes: list[str], size: int
) -> Images:
  pixels = np.empty((len(files), size, size, 3), np.uint8)
  for i, (path, _) in enumerate(files):
    with _name_file(path, "an image"):
      pixels[i] = _read_image(path, size)
  labels = np.array([classes.index(name) for _, name in files], np.int32)
  return Images(pixels, labels)


def _read_image(path: Path, size: int) -> np.ndarray:
  # Decoding alone skips the checksums that PNG has.
  with Image.open(path) as image:
    image.verify()
  with Image.open(path) as image:
    if image.mode not in _IMAGE_MODES:
      raise FileError(
        f"{str(path)!r} must have 8 bits a channel, got the mode {image.mode!r}"
        ": convert it first."
      )
    return np.asarray(image.convert("RGB").resize((size, size)))
