"""Files of checkpoints: arrays and a log, with a digest over every byte.

A file is a line of JSON, the bytes of its arrays, and the SHA-256 digest of
both. A file that was cut or changed anywhere no longer matches its digest.
"""

import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

_DIGEST_BYTES = hashlib.sha256().digest_size


class BrokenFileError(Exception):
  """A file that is missing, cut or changed; the message names the file."""


class Piece(NamedTuple):
  """A rectangular piece of one leaf.

  Attributes:
    leaf: index of the leaf.
    begin: index of the first element of the piece, along each dimension.
    array: elements of the piece.
  """

  leaf: int
  begin: tuple[int, ...]
  array: np.ndarray


class Part(NamedTuple):
  """The share of a checkpoint that one process saves.

  Attributes:
    facts: values that JSON knows.
    pieces: pieces of leaves.
  """

  facts: dict[str, Any]
  pieces: Sequence[Piece]


def write_part(path: pathlib.Path, part: Part) -> None:
  """Writes a part and waits until the disk has it.

  Args:
    path: file to write.
    part: what to write.

  Raises:
    OSError: the disk is full, or the system refuses for another reason.
  """
  arrays = [np.asarray(piece.array) for piece in part.pieces]
  pieces = [
    [piece.leaf, piece.begin, x.dtype.name, x.shape]
    for piece, x in zip(part.pieces, arrays, strict=True)
  ]
  digest = hashlib.sha256()
  header = json.dumps({"facts": part.facts, "pieces": pieces}) + "\n"
  with path.open("wb") as file:
    digest.update(header.encode())
    file.write(header.encode())
    for array in arrays:
      raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
      digest.update(raw)
      file.write(raw)
    file.write(digest.digest())
    file.flush()
    os.fsync(file.fileno())


def read_part(path: pathlib.Path) -> Part:
  """Reads a part whose every byte is as it was written.

  Args:
    path: file that `write_part` wrote.

  Returns:
    The part; its arrays may be written to.

  Raises:
    BrokenFileError: the file cannot be read or does not match its digest.
  """
  try:
    data = memoryview(path.read_bytes())
  except OSError as error:
    raise BrokenFileError(f"{path.name}: {error.strerror}") from error
  body = data[: max(0, len(data) - _DIGEST_BYTES)]
  if not _is_whole(body, data[len(body) :]):
    raise BrokenFileError(f"{path.name} does not match its checksum")
  line = bytes(body).index(b"\n")
  header = json.loads(bytes(body[:line]))
  offset = line + 1
  pieces = []
  for leaf, begin, dtype, shape in header["pieces"]:
    kind = jnp.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    array = np.frombuffer(body, kind, count, offset).reshape(shape).copy()
    pieces.append(Piece(leaf, tuple(begin), array))
    offset += array.nbytes
  return Part(header["facts"], pieces)


def _is_whole(body: memoryview, digest: memoryview) -> bool:
  return hashlib.sha256(body).digest() == digest
