"""Manifests: the checksum of every file in a folder.

A manifest is what `sha256sum` writes, so that `sha256sum --check` reads it. Its
last line is a comment with the checksum of the lines before. A file that is
missing, cut or changed no longer matches, nor does a file that was added, nor a
folder with another name.
"""

import hashlib
import os
import pathlib
import shutil
from concurrent.futures import ThreadPoolExecutor

NAME = "SHA256SUMS"
"""Name of the manifest in its folder."""

_THREADS = 16


class BrokenFileError(Exception):
  """A file that is missing, cut or changed; the message names the file."""


def write_manifest(folder: pathlib.Path, name: str) -> None:
  """Writes the checksums of a folder and waits until the disk has its files."""
  paths = _list_files(folder)
  # The disk takes many files at once in the time of a few.
  with ThreadPoolExecutor(_THREADS) as pool:
    digests = pool.map(lambda path: _hash_file(folder / path, True), paths)
    pairs = zip(digests, paths, strict=True)
    text = "".join(f"{digest}  {name}/{path}\n" for digest, path in pairs)
    folders = [pathlib.Path(parent) for parent, _, _ in os.walk(folder)]
    list(pool.map(sync_folder, folders))
  body = text.encode()
  with (folder / NAME).open("wb") as file:
    file.write(body + _make_seal(body))
    file.flush()
    os.fsync(file.fileno())
  sync_folder(folder)


def check_manifest(folder: pathlib.Path) -> dict[str, str]:
  """Checks that a folder has the files of its manifest and no others."""
  wanted = _read_manifest(folder)
  found = set(_list_files(folder))
  for path in sorted(found | set(wanted)):
    if path not in wanted:
      raise BrokenFileError(f"{path} is not in {NAME}")
    if path not in found:
      raise BrokenFileError(f"{path} is missing")
    try:
      digest = _hash_file(folder / path)
    except OSError as error:
      raise BrokenFileError(f"{path}: {error.strerror}") from error
    if not _is_same(digest, wanted[path]):
      raise BrokenFileError(f"{path} does not match its checksum")
  return wanted


def sync_folder(folder: pathlib.Path) -> None:
  """Waits until the disk has the names in a folder."""
  descriptor = os.open(folder, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  except OSError:
    pass  # Some file systems cannot, and keep names in order by themselves.
  finally:
    os.close(descriptor)


def remove_folder(folder: pathlib.Path) -> None:
  """Removes a folder and its files, as far as the system lets it."""
  with ThreadPoolExecutor(_THREADS) as pool:
    for path in _list_files(folder):
      pool.submit(os.unlink, folder / path)  # `rmtree` tries again.
  shutil.rmtree(folder, ignore_errors=True)


def _read_manifest(folder: pathlib.Path) -> dict[str, str]:
  try:
    data = (folder / NAME).read_bytes()
  except OSError as error:
    raise BrokenFileError(f"{NAME}: {error.strerror}") from error
  body = data[: -len(_make_seal(b""))]
  if not _is_same(data, body + _make_seal(body)):
    raise BrokenFileError(f"{NAME} does not match its checksum")
  sums = {}
  for line in body.decode(errors="replace").splitlines():
    digest, _, name = line.partition("  ")
    parent, _, path = name.partition("/")
    if parent != folder.name:
      raise BrokenFileError(f"{NAME} is of another checkpoint")
    sums[path] = digest
  return sums


def _make_seal(body: bytes) -> bytes:
  """Returns the last line of a manifest, of the same length for any body."""
  return f"# {hashlib.sha256(body).hexdigest()}\n".encode()


def _is_same(found: str | bytes, wanted: str | bytes) -> bool:
  return found == wanted


def _list_files(folder: pathlib.Path) -> list[str]:
  """Returns the paths of all files but the manifest."""
  paths = [
    pathlib.Path(parent, name).relative_to(folder).as_posix()
    for parent, _, names in os.walk(folder)
    for name in names
  ]
  return sorted(path for path in paths if path != NAME)


def _hash_file(path: pathlib.Path, is_new: bool = False) -> str:
  """Returns the checksum of a file; of a new one, when the disk has it."""
  with path.open("rb") as file:
    digest = hashlib.file_digest(file, "sha256")
    if is_new:
      os.fsync(file.fileno())
  return digest.hexdigest()
