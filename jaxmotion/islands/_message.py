"""Serialization of what islands store, in the format that the room states."""

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmotion import core

_MAGIC, _VERSION = b"JMIS", 1
_PREFIX = struct.Struct("<4sHI")
_DIGEST_BYTES = hashlib.sha256().digest_size


class MessageError(ValueError):
  """An object of the store that is refused, and the reason.

  Example:
    >>> from jaxmotion import islands
    >>> issubclass(islands.MessageError, ValueError)
    True
  """


class Message(NamedTuple):
  """Content of one object: its header, and its arrays."""

  header: dict[str, Any]
  arrays: list[np.ndarray[Any, Any]]


def pack_message(
  header: Mapping[str, Any], arrays: Sequence[Any] = ()
) -> bytes:
  """Returns the bytes of an object."""
  # header: values that JSON can hold; `kind` says what the object is.
  own = [np.asarray(a) for a in arrays]
  text = json.dumps(
    {**header, "arrays": list(map(_describe, own))},
    sort_keys=True,
    separators=(",", ":"),
  ).encode()
  parts = [_PREFIX.pack(_MAGIC, _VERSION, len(text)), text]
  body = b"".join([*parts, *map(_to_bytes, own)])
  return body + hashlib.sha256(body).digest()


def unpack_message(
  data: bytes, kind: str, likes: Sequence[core.ShapedLike] = ()
) -> Message:
  """Reads the bytes of an object with these arrays; raises `MessageError`."""
  if len(data) < _PREFIX.size + _DIGEST_BYTES:
    raise MessageError(f"it has only {len(data)} bytes")
  body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
  if hashlib.sha256(body).digest() != digest:
    raise MessageError("its SHA-256 is that of other bytes")
  magic, version, length = _PREFIX.unpack_from(body)
  if (magic, version) != (_MAGIC, _VERSION):
    raise MessageError(f"it begins with {magic!r} and version {version}")
  start = _PREFIX.size + length
  try:
    header = json.loads(body[_PREFIX.size : start])
    found = json.dumps([header["kind"], header.pop("arrays")])
  except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
    raise MessageError("its header is not one of an object") from None
  # No shape is read from the header: it is compared with what must be there.
  # As text, because True equals 1.
  if found != json.dumps([kind, list(map(_describe, likes))]):
    raise MessageError(f"it is no {kind} with the arrays of this run")
  dtypes = [_little(a.dtype) for a in likes]
  sizes = [math.prod(a.shape) for a in likes]
  nbytes = [n * d.itemsize for n, d in zip(sizes, dtypes, strict=True)]
  if sum(nbytes) != len(body) - start:
    raise MessageError(f"its arrays have {len(body) - start} bytes")
  arrays = []
  for like, dtype, size, n in zip(likes, dtypes, sizes, nbytes, strict=True):
    flat = np.frombuffer(body[start : start + n], dtype, size)
    arrays.append(flat.astype(like.dtype, copy=False).reshape(like.shape))
    start += n
  return Message(header, arrays)


def checksum_arrays(tree: core.PyTree) -> str:
  """Returns the SHA-256 of all arrays of a tree, in hexadecimal digits."""
  digest = hashlib.sha256()
  for leaf in map(np.asarray, jax.tree.leaves(tree)):
    digest.update(json.dumps(_describe(leaf)).encode())
    digest.update(_to_bytes(leaf))
  return digest.hexdigest()


def _describe(like: core.ShapedLike) -> list[Any]:
  """Returns dtype and shape as a header has them."""
  return [jnp.dtype(like.dtype).name, list(like.shape)]


def _to_bytes(array: np.ndarray[Any, Any]) -> bytes:
  """Returns the elements with the least byte first, in C order."""
  return array.astype(_little(array.dtype), copy=False).tobytes()


def _little(dtype: Any) -> np.dtype[Any]:
  """Returns a dtype with the least byte first."""
  return jnp.dtype(dtype).newbyteorder("<")
