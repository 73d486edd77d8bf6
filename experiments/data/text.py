"""Bytes of text that every machine has: Python's own standard library."""

import hashlib
import os
import sysconfig
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments.common.console import JobError
from experiments.common.files import FileError, MissingFileError
from experiments.data.labels import is_held_out

_SKIPPED_FOLDERS = frozenset(
  {"site-packages", "dist-packages", "test", "tests", "idle_test"}
)
_SKIPPED_PREFIX = "_sysconfigdata"  # Written at build time: machine specific.
_HELD_OUT_OF_256 = 26  # About a tenth of the files.


class TextData(NamedTuple):
  """One fixed split of a byte corpus."""

  train: np.ndarray  # Text to train on, uint8 `(train_bytes,)`.
  test: np.ndarray  # Text of other files, uint8 `(test_bytes,)`.


def load_text(config: ConfigDict) -> TextData:
  """Reads the corpus that a configuration names."""
  if config.data != "stdlib":
    raise JobError(
      f"`config.data` must be stdlib for a text model, got {config.data!r}."
    )
  return read_sources(config.data_dir, config.train_bytes, config.test_bytes)


def read_sources(
  folder: str | None, train_bytes: int, test_bytes: int
) -> TextData:
  """Reads the sources of a folder, or of the standard library."""
  root = Path(folder or sysconfig.get_paths()["stdlib"])
  files = list_sources(root)
  test = [
    path
    for path in files
    if is_held_out(path.relative_to(root), _HELD_OUT_OF_256)
  ]
  held_out = set(test)
  train = [path for path in files if path not in held_out]
  for name, paths in (("train", train), ("test", test)):
    if not paths:
      raise MissingFileError(
        f"`config.data_dir` must hold *.py files for the {name} split, got"
        f" none in {str(root)!r}."
      )
  return TextData(
    _read_limited(train, train_bytes), _read_limited(test, test_bytes)
  )


def list_sources(root: Path) -> list[Path]:
  """Returns Python sources under `root`, sorted by path, without tests."""
  found = []
  for folder, folders, names in os.walk(root):
    folders[:] = [name for name in folders if name not in _SKIPPED_FOLDERS]
    found += [Path(folder, name) for name in names if name.endswith(".py")]
  kept = [
    path
    for path in found
    if not path.name.startswith(_SKIPPED_PREFIX) and path.is_file()
  ]
  return sorted(kept, key=lambda path: path.relative_to(root).as_posix())


def corpus_sha256(data: TextData) -> str:
  """Returns the SHA-256 of the bytes that a measurement was made on."""
  digest = hashlib.sha256(data.train.tobytes())
  digest.update(data.test.tobytes())
  return digest.hexdigest()


def zlib_bits_per_byte(text: np.ndarray) -> float:
  """Returns the size of text under zlib at level 9, in bits a byte."""
  return 8 * len(zlib.compress(text.tobytes(), 9)) / text.size


def cut_windows(text: np.ndarray, length: int) -> np.ndarray:
  """Cuts text into windows that predict every byte except the first."""
  _require_window(text, length)
  count = (text.size - 1) // length
  index = np.arange(count)[:, None] * length + np.arange(length + 1)[None, :]
  return text[index].astype(np.int32)


def draw_windows(
  text: np.ndarray, length: int, size: int, seed: int, step: int
) -> np.ndarray:
  """Returns the windows of one step: a pure function of its arguments."""
  _require_window(text, length)
  random = np.random.default_rng([seed, step])
  start = random.integers(0, text.size - length, size)
  index = start[:, None] + np.arange(length + 1)[None, :]
  return text[index].astype(np.int32)


def _require_window(text: np.ndarray, length: int) -> None:
  if text.size <= length:
    raise JobError(
      f"`text` must be longer than one window of {length} bytes, got"
      f" {text.size}."
    )


def _read_limited(files: list[Path], limit: int) -> np.ndarray:
  """Returns the first `limit` bytes of the concatenated files."""
  parts: list[bytes] = []
  total = 0
  for path in files:
    if total >= limit:
      break
    try:
      parts.append(path.read_bytes()[: limit - total])
    except OSError as error:
      raise FileError(
        f"{str(path)!r} must be a file that can be read: {error.strerror}."
      ) from error
    total += len(parts[-1])
  return np.frombuffer(b"".join(parts), np.uint8)
