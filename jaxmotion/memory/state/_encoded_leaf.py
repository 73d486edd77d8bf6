"""Leaves of a tree that are encoded and say how to decode them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion.codecs import Codec
from jaxmotion.core import Array, Key, PyTree, shape_varying_like
from jaxmotion.memory._memory_kind import to_device


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("payload",),
  meta_fields=("codec", "shape", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class EncodedLeaf:
  """An encoded array.

  Attributes:
    payload: what the codec made of it.
    codec: made it.
    shape: of the array.
    dtype: of the array, its name.
  """

  payload: PyTree
  codec: Codec
  shape: tuple[int, ...]
  dtype: str

  @property
  def like(self) -> jax.ShapeDtypeStruct:
    """The array's type."""
    return shape_varying_like(self.shape, self.dtype, self.payload)

  def decode(self) -> Array:
    """Returns the array; the payload is on the device."""
    return self.codec.decode(self.payload, self.like)


def pack(x: Array, codec: Codec, key: Key) -> EncodedLeaf:
  """Encodes an array."""
  payload, _ = codec.encode(x, (), key)
  return EncodedLeaf(payload, codec, tuple(x.shape), jnp.dtype(x.dtype).name)


def decompress_state(state: PyTree) -> PyTree:
  """Decodes every leaf of a state that is packed.

  Args:
    state: a `CompressedState`, or a tree with some in it.

  Returns:
    The tree, with arrays on the device for its `EncodedLeaf` leaves.

  Example:
    >>> import optax
    >>> from jaxmotion.memory import compress_state
    >>> state = compress_state(optax.adam(1e-3)).init(jnp.zeros((64, 64)))
    >>> decompress_state(state).inner[0].mu.shape
    (64, 64)
  """

  def decoded(x: Any) -> Any:
    return on_device(x).decode() if is_packed(x) else x

  return jax.tree.map(decoded, state, is_leaf=is_packed)


def on_device(packed: EncodedLeaf) -> EncodedLeaf:
  """Returns it with its payload on the device."""
  return dataclasses.replace(packed, payload=to_device(packed.payload))


def is_packed(x: Any) -> bool:
  """Says whether a node is `EncodedLeaf`."""
  return isinstance(x, EncodedLeaf)


def flatten(tree: PyTree) -> tuple[list[tuple[Any, Any]], Any]:
  """Returns (key path, leaf) of every leaf, packed ones whole, and the rest."""
  return jax.tree.flatten_with_path(tree, is_leaf=is_packed)
