"""Files that runners read and write: strict JSON, and paths that will work.

Nothing that is read here is run as code, and nothing is unpacked to disk.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from experiments.common.console import JobError


class FileError(JobError):
  """A file that cannot be read or written; the message is one line."""


class MissingFileError(FileError, FileNotFoundError):
  """A file or folder that is not there; the message is one line."""


def read_text(path: str | os.PathLike[str]) -> str:
  """Returns the text of a UTF-8 file."""
  try:
    return Path(path).read_bytes().decode()
  except FileNotFoundError as error:
    raise MissingFileError(_describe(path, "exist, and does not")) from error
  except OSError as error:
    text = f"be a file that can be read: {error.strerror}"
    raise FileError(_describe(path, text)) from error
  except UnicodeDecodeError as error:
    text = f"be UTF-8 text, and is not at byte {error.start}"
    raise FileError(_describe(path, text)) from error


def parse_object(text: str) -> dict[str, Any]:
  """Returns the JSON object that a text is.

  >>> parse_object('{"seed": 1, "seed": 2}')
  Traceback (most recent call last):
  ...
  ValueError: the name 'seed' is there twice
  """
  try:
    found = json.loads(text, object_pairs_hook=_make_object)
  except RecursionError:
    raise ValueError("it is nested too deeply") from None
  if not isinstance(found, dict):
    raise ValueError(f"it is a {type(found).__name__}, not an object")
  return found


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  found: dict[str, Any] = {}
  for name, value in pairs:
    if name in found:
      raise ValueError(f"the name {name!r} is there twice")
    found[name] = value
  return found


def check_output(path: str | os.PathLike[str]) -> None:
  """Raises unless a file can be written, and leaves nothing behind."""
  path = Path(path)
  if not path.name or path.is_dir():
    raise FileError(_describe(path, "be a file, and is a folder"))
  check_folder(path.parent)
  if path.exists() and not os.access(path, os.W_OK):
    raise FileError(_describe(path, "be a file that can be written"))


def check_folder(path: str | os.PathLike[str]) -> None:
  """Raises unless files can be written to a folder, or to one made for them."""
  folder = Path(path).absolute()
  try:
    while not folder.exists():
      folder = folder.parent
    # Permissions do not tell all: the disk may be read-only or no disk at all.
    with tempfile.TemporaryFile(dir=folder):
      pass
  except OSError as error:
    text = f"be a folder that files can be written to: {error.strerror}"
    raise FileError(_describe(path, f"{text} ({folder})")) from error


def check_plot(path: str | os.PathLike[str]) -> None:
  """Raises unless a plot can be written to a file."""
  # Takes 0.5 s to import.
  from matplotlib.backends.backend_agg import FigureCanvasAgg

  path = Path(path)
  kinds = sorted(FigureCanvasAgg.get_supported_filetypes())
  if path.suffix.lower().removeprefix(".") not in kinds:
    text = f"end in .{', .'.join(kinds)}"
    raise FileError(_describe(path, text))
  check_output(path)


def _describe(path: str | os.PathLike[str], condition: str) -> str:
  return f"{str(path)!r} must {condition}."
