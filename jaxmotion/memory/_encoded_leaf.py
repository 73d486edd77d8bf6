"""`EncodedLeaf`, and updates that decode and encode their state in parts."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmotion import codecs, core, program
from jaxmotion.core import Array, PyTree
from jaxmotion.memory import _memory_kind

# Parameters that may begin before the present one is done: the state of one is
# transferred from the host while another's update is computed.
_MAX_AHEAD = 1


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


@core.declare(state=core.arrays)
def decompress_state(state: PyTree) -> PyTree:
  """Decodes every encoded leaf of an optimizer state.

  Args:
    state: state of `compress_state`, or a tree that contains some.

  Returns:
    The tree, with arrays on the device in place of its `EncodedLeaf` leaves.

  Raises:
    TypeError: there is no compressed state in the tree.
    ValueError: a payload does not fit its codec.

  Example:
    >>> import jax, optax
    >>> from jaxmotion.memory import compress_state
    >>> tx = compress_state(optax.adam(1e-3))
    >>> state = jax.jit(tx.init)(jnp.zeros((64, 64)))
    >>> jax.jit(decompress_state)(state).inner[0].mu.shape
    (64, 64)
  """
  is_state = lambda x: is_encoded(x) or hasattr(x, "_fields")
  if not any(map(is_state, jax.tree.leaves(state, is_leaf=is_state))):
    raise TypeError(
      "`state` must be a CompressedState or a tree that contains some, got "
      f"{state!r:.200}."
    )
  check_payloads("state", state)

  return map_encoded(
    lambda x: move_payload(x, _memory_kind.to_device).decode(), state
  )


def map_encoded(fn: Callable[[EncodedLeaf], Any], tree: PyTree) -> PyTree:
  """Applies a function to the encoded leaves of a tree alone."""
  return jax.tree.map(
    lambda x: fn(x) if is_encoded(x) else x, tree, is_leaf=is_encoded
  )


def check_payloads(name: str, tree: PyTree) -> None:
  """Raises unless every encoded leaf has the payload that its codec makes."""
  for path, x in flatten_encoded(tree)[0]:
    if is_encoded(x):
      like = x.codec.payload_like(jax.ShapeDtypeStruct(x.shape, x.dtype))
      source = f"{x.codec!r} at {core.leaf_path(path)!r}"
      core.check_like(name, x.payload, like, source)


def move_payload(
  leaf: EncodedLeaf, move: Callable[[PyTree], PyTree]
) -> EncodedLeaf:
  """Returns an encoded leaf whose payload was moved to another memory."""
  return dataclasses.replace(leaf, payload=move(leaf.payload))


def is_encoded(x: Any) -> bool:
  """Says whether a node of a tree is an `EncodedLeaf`."""
  return isinstance(x, EncodedLeaf)


def flatten_encoded(tree: PyTree) -> tuple[list[tuple[Any, Any]], Any]:
  """Flattens a tree to (key path, leaf) pairs, with encoded leaves whole."""
  # Returns the pairs and the tree's structure.
  return jax.tree.flatten_with_path(tree, is_leaf=is_encoded)


def stream_update(
  update: Callable[[list[Any]], tuple[PyTree, list[Any]]],
  leaves: Sequence[Any],
  keys: Sequence[core.Key],
  on_host: bool,
) -> tuple[PyTree, list[Any]]:
  """Computes an update one array of `updates` at a time."""
  # Traces `update` once on decoded leaves, then evaluates its outputs one by
  # one. For each array of `updates` it decodes the state leaves that the array
  # depends on and computes the array. It then computes the new values of those
  # leaves and encodes them.
  # Invariant: a leaf is decoded only after the new state of the last parameter
  # but one is encoded. An `optimization_barrier` ties the leaf's payload to the
  # first elements of those payloads. Without the barrier XLA may transfer from
  # the host, or decode, everything first, and the decoded state would be in
  # memory at once. The tie is not to the last parameter itself, so that a
  # transfer overlaps with one computation.
  # keys: of the rounding of each leaf. on_host: whether payloads stay there.
  # Returns `updates` and the new leaves.
  encoded = [i for i, x in enumerate(leaves) if is_encoded(x)]

  def update_decoded(arrays: list[Array]) -> tuple[PyTree, list[Any]]:
    decoded = list(leaves)
    for i, a in zip(encoded, arrays, strict=True):
      decoded[i] = a
    return update(decoded)

  traced, (updates, _) = jax.make_jaxpr(update_decoded, return_shape=True)(
    [core.abstract_like(leaves[i].like) for i in encoded]
  )
  flat = program.flatten(traced)
  order, known = program.Order(flat.steps), dict(flat.constants)
  leaf_of = dict(zip(flat.inputs, encoded, strict=True))
  treedef: Any = jax.tree.structure(updates)
  new_leaves: dict[int, Any] = {}
  decoded_leaves: list[int] = []  # Decoded, and not encoded again yet.
  # For each parameter that decoded any state: the first element of each payload
  # that it has encoded.
  markers: list[list[Array]] = []

  def load_leaf(i: int) -> Array:
    """Decodes a leaf when the last parameter but one is encoded again."""
    decoded_leaves.append(i)
    x = leaves[i]
    if len(markers) > _MAX_AHEAD:
      payload, _ = lax.optimization_barrier(
        (x.payload, markers[-1 - _MAX_AHEAD])
      )
      x = dataclasses.replace(x, payload=payload)
    return (move_payload(x, _memory_kind.to_device) if on_host else x).decode()

  def run_output(position: int) -> Array:
    """Runs the steps that an output still needs, and loads what they read."""
    wanted = flat.outputs[position]
    steps = order.leading_to([wanted], known)
    for value in (wanted, *(v for step in steps for v in step.reads)):
      if isinstance(value, program.Value) and value in leaf_of:
        if value not in known:
          known[value] = load_leaf(leaf_of[value])
    program.evaluate(steps, known)
    return program.read_operand(known, wanted)

  def store_leaf(i: int) -> None:
    """Computes and encodes the new value of a leaf."""
    # This may decode further leaves, which the loop in `compute_output` then
    # stores as well.
    new = run_output(treedef.num_leaves + i)
    x = encode_leaf(new, leaves[i].codec, keys[i])
    markers[-1].append(jax.tree.leaves(x.payload)[0].reshape(-1)[0])
    new_leaves[i] = move_payload(x, _memory_kind.to_host) if on_host else x

  def compute_output(position: int) -> Array:
    """Runs an output, and stores all leaves of the state that it decoded."""
    y = run_output(position)
    if decoded_leaves:
      markers.append([])
    while decoded_leaves:
      store_leaf(decoded_leaves.pop())
    return y

  new_updates = [compute_output(i) for i in range(treedef.num_leaves)]
  for i in range(len(leaves)):
    y = compute_output(treedef.num_leaves + i)
    if i not in encoded:
      new_leaves[i] = y
    elif i not in new_leaves:
      store_leaf(i)
  return treedef.unflatten(new_updates), [
    new_leaves[i] for i in range(len(leaves))
  ]
