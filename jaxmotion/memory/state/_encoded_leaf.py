"""`EncodedLeaf`: a pytree node of a payload and what its decoding needs."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxmotion import codecs, core
from jaxmotion.core import Array, PyTree
from jaxmotion.memory import _memory_kind


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("payload",),
  meta_fields=("codec", "shape", "dtype"),
)
@dataclasses.dataclass(frozen=True)
class EncodedLeaf:
  """An encoded array that takes the place of a leaf in a tree.

  Attributes:
    payload: pytree of arrays that the codec returned.
    codec: codec that encoded the array.
    shape: shape of the array.
    dtype: name of the array's dtype.

  Example:
    >>> from jaxmotion import codecs
    >>> codec = codecs.uniform(bits=8)
    >>> payload, _ = codec.encode(jnp.array([0.0, 127.0]))
    >>> EncodedLeaf(payload, codec, (2,), "float32").decode().tolist()
    [0.0, 127.0]
  """

  payload: PyTree
  codec: codecs.Codec
  shape: tuple[int, ...]
  dtype: str

  @property
  def like(self) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the decoded array."""
    return core.shape_varying_like(self.shape, self.dtype, self.payload)

  def decode(self) -> Array:
    """Returns the decoded array; the payload must be on the device."""
    return self.codec.decode(self.payload, self.like)


def encode_leaf(x: Array, codec: codecs.Codec, key: core.Key) -> EncodedLeaf:
  """Encodes an array with a codec that has no state."""
  payload, _ = codec.encode(x, (), key)
  return EncodedLeaf(payload, codec, tuple(x.shape), jnp.dtype(x.dtype).name)


def decompress_state(state: PyTree) -> PyTree:
  """Decodes every encoded leaf of an optimizer state.

  Args:
    state: a `CompressedState`, or a tree that contains some.

  Raises:
    TypeError: there is no compressed state in the tree.
    ValueError: a payload does not fit its codec.

  Returns:
    The tree, with arrays on the device in place of its `EncodedLeaf` leaves.

  Example:
    >>> import jax, optax
    >>> from jaxmotion.memory import compress_state
    >>> tx = compress_state(optax.adam(1e-3))
    >>> state = jax.jit(tx.init)(jnp.zeros((64, 64)))
    >>> jax.jit(decompress_state)(state).inner[0].mu.shape
    (64, 64)
  """

  is_state = lambda x: is_encoded(x) or hasattr(x, "_fields")
  nodes = jax.tree.leaves(state, is_leaf=is_state)
  if not any(map(is_state, nodes)):
    raise TypeError(
      "`state` must be a CompressedState or a tree that contains some, got "
      f"{state!r:.200}."
    )
  core.check_arrays("state", state)
  check_payloads("state", state)

  def decode_leaf(x: Any) -> Any:
    return move_to_device(x).decode() if is_encoded(x) else x

  return jax.tree.map(decode_leaf, state, is_leaf=is_encoded)


def decoded_likes(tree: PyTree) -> PyTree:
  """Returns a tree with shapes in place of its encoded leaves."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_encoded(x) else x,
    tree,
    is_leaf=is_encoded,
  )


def check_payloads(name: str, tree: PyTree) -> None:
  """Raises unless every encoded leaf has the payload that its codec makes."""
  for path, x in flatten_encoded(tree)[0]:
    if is_encoded(x):
      like = x.codec.payload_like(jax.ShapeDtypeStruct(x.shape, x.dtype))
      source = f"{x.codec!r} at {core.leaf_path(path)!r}"
      core.check_like(name, x.payload, like, source)


def move_to_device(leaf: EncodedLeaf) -> EncodedLeaf:
  """Returns an encoded leaf with its payload in device memory."""
  return dataclasses.replace(leaf, payload=_memory_kind.to_device(leaf.payload))


def is_encoded(x: Any) -> bool:
  """Says whether a node of a tree is an `EncodedLeaf`."""
  return isinstance(x, EncodedLeaf)


def flatten_encoded(tree: PyTree) -> tuple[list[tuple[Any, Any]], Any]:
  """Flattens a tree into (key path, leaf) pairs, with encoded leaves whole."""
  # Returns the pairs and the tree's structure.
  return jax.tree.flatten_with_path(tree, is_leaf=is_encoded)
